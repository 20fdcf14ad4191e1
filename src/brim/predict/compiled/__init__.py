"""``torch.compile`` in a trace: graphs, the kernels that Inductor makes of them, and their memory."""
