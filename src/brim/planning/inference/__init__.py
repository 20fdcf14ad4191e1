"""Decides how a model is run forward, and proves it."""
