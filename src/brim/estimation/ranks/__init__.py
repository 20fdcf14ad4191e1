"""Estimate the memory of every rank of a split training job, and the seconds of its step."""
