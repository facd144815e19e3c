"""Scaling studies: measure, simulate and predict training speed on any number of ranks."""
