"""``brim train``."""
