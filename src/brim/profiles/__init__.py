"""Profiles of PyTorch's profiler and Nsight Systems as figures and Timelines."""
