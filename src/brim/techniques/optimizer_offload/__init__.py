"""Optimizer offload: states, and gradients if asked for, rest in RAM or on disk."""
