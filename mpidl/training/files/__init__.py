"""Files of a run: its folder, checkpoints, models."""
