"""Layers, the network made of them, and the networks that come along."""
