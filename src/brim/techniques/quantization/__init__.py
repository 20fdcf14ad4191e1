"""Linear layers in 8 and 4 bits, moved as they are stored."""
