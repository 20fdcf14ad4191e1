"""Ways to take less memory. One folder or file is one technique, each with its ``apply``."""
