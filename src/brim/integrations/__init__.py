"""Modules that other libraries load; none of them is imported unless it is used."""
