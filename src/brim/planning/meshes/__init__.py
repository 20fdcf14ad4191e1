"""Search the fastest splits of a training job over GPUs."""
