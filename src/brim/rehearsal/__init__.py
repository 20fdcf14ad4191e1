"""Rehearsals: programs run by PyTorch's own CUDA build on GPUs that are not there (``brim.device``)."""
