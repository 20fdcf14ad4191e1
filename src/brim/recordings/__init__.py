"""Recordings of PyTorch's allocator: read without trust, replayed, also under other settings."""
