"""``brim.fit``: fit an existing module into a budget, in place."""
