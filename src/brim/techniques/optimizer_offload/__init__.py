"""Optimizer offload: states, and optionally gradients, rest in RAM or on disk."""
