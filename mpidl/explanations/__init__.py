"""Explain the decisions of networks: maps of the pixels that a class score depends on."""
