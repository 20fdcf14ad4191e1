"""Activation offload: what autograd saves leaves the compute tier until backward needs it."""
