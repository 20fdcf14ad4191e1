"""``brim train``: one loop over a plan's schedule, inside a budget."""
