"""Certificates of training runs: what a run was made of, and digests of its state on the way."""
