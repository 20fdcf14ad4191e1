"""``brim generate``."""
