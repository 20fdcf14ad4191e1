"""Rehearsals: programs run by PyTorch's own CUDA build on simulated GPUs (``brim.device``)."""
