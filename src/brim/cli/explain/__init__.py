"""``brim explain``."""
