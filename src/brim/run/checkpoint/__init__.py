"""Training checkpoints: written so that a complete one always exists, read with checksums."""
