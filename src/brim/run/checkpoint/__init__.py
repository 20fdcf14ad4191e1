"""Training checkpoints: written so that a whole one is always there, read with checksums."""
