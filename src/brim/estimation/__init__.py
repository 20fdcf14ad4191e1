"""Estimate a step: build it on fake tensors, simulate its memory, sum up where the bytes go."""
