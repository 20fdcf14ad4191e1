"""``brim plan``."""
