"""Compute losses of the overlap of regions with kernels/cuda/overlap.cu."""

import numpy as np

from mpidl.backends.gpu import array, fold, launching
from mpidl.backends.gpu.elementwise import scale_of
from mpidl.backends.gpu.loss import by_image, pixels_of
from mpidl.backends.training_interface import DICE
from mpidl.core.blocks import LANES

THREADS = 256


def overlap(p, labels, counts, tree, rule=DICE):
    rows, pixels, classes = pixels_of(p, "overlap")
    images = rows // pixels
    sums = launching.empty((images, classes, 3), np.float64)
    slopes = launching.empty((images, classes, 2), np.float64)
    losses = array.empty((images, 1), np.float64)
    arrays = p, by_image(labels, "overlap"), counts, sums
    numbers = int(rule.is_squared), classes, pixels
    launching.launch("overlap_sums", images * classes, THREADS, *arrays, *numbers)
    weights = None if rule.class_weights is None else launching.constant(rule.class_weights)
    numbers = rule.smooth, int(rule.generalized), int(rule.is_squared)
    factors = rule.above, rule.below, rule.chances, rule.labelled
    blocks = launching.blocks_of_threads(images)
    arguments = sums, counts, weights, losses, slopes, *numbers, *factors, classes, images
    launching.launch("overlap_losses", blocks, launching.THREADS, *arguments)
    return fold.partial_of_leaves(losses, tree, LANES, shape=()), slopes


def overlap_dp(p, labels, slopes, scale, counts, rule=DICE):
    _, pixels, classes = pixels_of(p, "overlap_dp")
    d = array.empty_like(p, np.float32)
    arrays = p, by_image(labels, "overlap_dp"), counts, slopes
    blocks = launching.blocks_of_threads(p.size)
    numbers = *scale_of(scale), d, int(rule.is_squared), classes, pixels, p.size
    launching.launch("overlap_dp", blocks, launching.THREADS, *arrays, *numbers)
    return d
