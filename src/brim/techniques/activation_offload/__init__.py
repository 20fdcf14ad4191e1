"""Activation offload: tensors that autograd saves leave the compute tier until backward needs them."""
