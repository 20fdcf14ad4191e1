"""``brim plan`` and ``brim.plan``: the fastest ways that fit a machine, searched and proved."""
