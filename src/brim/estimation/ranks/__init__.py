"""What every rank of a split training job takes, and how long its step is."""
