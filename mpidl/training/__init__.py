"""Training: the loop, its step on a GPU, optimizers, schedules, options and files."""
