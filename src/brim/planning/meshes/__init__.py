"""The fastest ways to split a training job over GPUs."""
