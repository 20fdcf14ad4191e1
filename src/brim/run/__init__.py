"""Models opened, planned, trained, generated from and watched inside a budget."""
