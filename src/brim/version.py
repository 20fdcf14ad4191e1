"""The version of brim, for code that writes it into a file: a leaf, as ``brim`` itself names nearly everything."""

__version__ = "0.1.0"
