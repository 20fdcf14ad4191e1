"""The KV cache as a planned storage, its older tokens in RAM where VRAM is short."""
