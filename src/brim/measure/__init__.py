"""Measurements: bandwidths of this machine, and the memory that a run takes."""
