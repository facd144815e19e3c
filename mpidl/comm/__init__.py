"""Ranks and what they say to each other; the one package that imports mpi4py."""
