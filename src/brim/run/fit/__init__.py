"""``brim.fit``: a module that exists already, in place, inside a budget."""
