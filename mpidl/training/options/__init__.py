"""Training options: their declarations, types and checks, and the sources of their values."""
