"""PyTorch's CUDA caching allocator, simulated step for step, without a device."""
