"""Changes to images: preprocessing, augmentation, normalization."""
