"""``brim generate`` and ``brim.load``: text out of a model that may be larger than memory."""
