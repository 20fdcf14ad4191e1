"""The requests of commands, with their options: modules that need no PyTorch."""
