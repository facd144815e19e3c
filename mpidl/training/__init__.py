"""Training: options, loop, optimizers, checkpoints, evaluation."""
