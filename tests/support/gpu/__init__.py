"""Recorded runs on GPUs: their cases, how one is run and predicted, and how far off predictions are."""
