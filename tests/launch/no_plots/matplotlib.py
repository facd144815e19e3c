"""Replaces matplotlib in tests that need it to be missing."""

raise ImportError("matplotlib is left out here")
