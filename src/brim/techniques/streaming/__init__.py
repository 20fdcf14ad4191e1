"""Weight streaming: some blocks stay in the compute tier, the others pass through a ring of slots."""
