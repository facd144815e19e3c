"""The training loop, training steps, optimizers, schedules, options and files."""
