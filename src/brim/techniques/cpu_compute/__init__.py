"""Blocks whose weights rest in RAM and which the CPU computes there."""
