"""Hide the package matplotlib in tests that require it to be missing."""

raise ImportError("matplotlib is left out here")
