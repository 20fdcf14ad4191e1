"""Expert streaming: a cache per layer loads the experts of a mixture one by one."""
