"""What a model's parts take on this machine in seconds: measured once, and remembered."""
