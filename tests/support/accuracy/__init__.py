"""Predictions against what other people measured, one module per source."""
