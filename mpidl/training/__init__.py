"""Training: the loop, its steps, optimizers, schedules, options and files."""
