"""Weights and networks in the file formats of other libraries."""
