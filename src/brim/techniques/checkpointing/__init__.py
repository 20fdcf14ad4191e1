"""Checkpointing: a block keeps its inputs, and backward computes the rest again."""
