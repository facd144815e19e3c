"""Stands in for matplotlib where it is to be missing."""

raise ImportError("matplotlib is left out here")
