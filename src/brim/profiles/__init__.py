"""Profiles of PyTorch's profiler as figures and Timelines."""
