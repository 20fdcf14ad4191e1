"""What really happened: bandwidths of this machine, and what a run took."""
