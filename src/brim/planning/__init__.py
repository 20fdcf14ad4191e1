"""Search, prove and write plans of a step."""
