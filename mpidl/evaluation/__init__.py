"""Evaluate networks: accuracy and errors, predictions, validation, and confusion matrices."""
