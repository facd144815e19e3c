"""Transforms of images: preprocessing, augmentation, normalization."""
