"""Techniques that save memory. Each folder or file has one technique, with its function ``apply``."""
