"""``brim train``: a training loop that follows a plan, inside a budget."""
