"""Options, the loop, optimizers, checkpoints, evaluation."""
