"""``brim estimate``."""
