"""Rehearsals: programs and PyTorch's own CUDA build on GPUs that are not there.

``device`` is a CUDA device that does not compute, in C; ``build`` makes a library folder of it for one PyTorch,
``environment`` finds or makes a CUDA build of PyTorch, ``settings`` says which card the device is.
"""
