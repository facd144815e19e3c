"""Evaluation: accuracy and errors, predictions, validation during training, confusion matrices."""
