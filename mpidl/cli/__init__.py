"""Implementations of the commands, such as `python -m mpidl.train`, and their arguments."""
