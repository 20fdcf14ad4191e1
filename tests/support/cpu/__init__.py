"""Real runs on a CPU, and the models and programs that are run."""
