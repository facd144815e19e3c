"""Automatic differentiation: the tape and its ops."""
