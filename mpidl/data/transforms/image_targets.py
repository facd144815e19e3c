"""Targets that are images or label maps, and therefore move with the augmented images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl.data.datastore import Datastore


def has_image_targets(datastore: Datastore) -> bool:
    """Return whether targets are images or label maps with the size of the images."""
    shape = datastore.targets_shape
    return (
        shape is not None
        and len(shape) > 1
        and tuple(shape[-2:]) == tuple(datastore.image_shape[1:])
    )


def moved_shape(datastore: Datastore, image_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of targets after images are cropped to `image_shape` (C, P, Q)."""
    shape = tuple(datastore.targets_shape or ())
    return (*shape[:-2], *image_shape[1:]) if has_image_targets(datastore) else shape


def nearest_warp(
    labels: np.ndarray, maps: np.ndarray, size: Sequence[int], fill: np.ndarray
) -> np.ndarray:
    """Transform label maps (n, C, H, W) like `Backend.warp` transforms images, but with the nearest
    pixel. `fill` (C,) is the label of pixels outside the image.
    """
    (n, channels, height, width), (p, q) = labels.shape, size
    out = np.empty((n, channels, p, q), labels.dtype)
    rows, columns = np.mgrid[:p, :q].astype(np.float64)
    for image, m, result in zip(labels, maps, out, strict=True):
        x = np.floor(m[0] * columns + (m[1] * rows + m[2]) + 0.5)
        y = np.floor(m[3] * columns + (m[4] * rows + m[5]) + 0.5)
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        j = np.clip(x, 0, width - 1).astype(np.int64)
        i = np.clip(y, 0, height - 1).astype(np.int64)
        result[...] = np.where(inside, image[:, i, j], fill.reshape(-1, 1, 1))
    return out
