"""Scaling studies: measure, simulate and predict the speed of a training on any number of ranks."""
