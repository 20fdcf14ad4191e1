"""Training and generation over several ranks."""
