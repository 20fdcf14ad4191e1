"""What PyTorch's allocator recorded of a run: read without trust, replayed, and asked what would have been."""
