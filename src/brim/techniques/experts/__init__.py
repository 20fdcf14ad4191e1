"""Expert streaming: the experts of a mixture come one by one into a cache per layer."""
