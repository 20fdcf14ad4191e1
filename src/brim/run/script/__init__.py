"""``brim run``: a program that knows nothing of brim, run inside a budget."""
