"""What a run shows: console, metrics file, plots."""
