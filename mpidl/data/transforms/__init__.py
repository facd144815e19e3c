"""Transform images: preprocessing, augmentation and normalization."""
