"""CPU compute: the CPU computes blocks whose weights rest in RAM."""
