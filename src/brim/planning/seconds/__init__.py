"""Measure the seconds of a model's parts on this machine, and cache them."""
