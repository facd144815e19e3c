"""Training options: declarations, checks, and the sources of their values."""
