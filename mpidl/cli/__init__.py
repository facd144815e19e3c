"""Argument definitions shared by the commands."""
