"""Decides how a step is run: searches, proves and writes plans."""
