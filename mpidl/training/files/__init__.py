"""Files of a training run: its folder, checkpoints and model files."""
