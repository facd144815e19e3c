"""Predict large images in overlapping tiles, whose scores are blended."""
