"""Budgets, buffers and the bytes that move between them: pools, backing stores, transfer engines."""
