"""Compute the Dice loss with kernels/cuda/dice.cu."""

import numpy as np

from mpidl.backends.gpu import array, fold, launching
from mpidl.backends.gpu.loss import by_image, pixels_of, scale_of
from mpidl.backends.training_interface import PLAIN_DICE
from mpidl.core.blocks import LANES

THREADS = 256


def dice(p, labels, counts, tree, rule=PLAIN_DICE):
    rows, pixels, classes = pixels_of(p, "dice")
    images = rows // pixels
    sums = launching.empty((images, classes, 3), np.float64)
    slopes = launching.empty((images, classes, 2), np.float64)
    losses = array.empty((images, 1), np.float64)
    arrays = p, by_image(labels, "dice"), counts, sums
    launching.launch("dice_sums", images * classes, THREADS, *arrays, classes, pixels)
    weights = None if rule.class_weights is None else launching.constant(rule.class_weights)
    numbers = rule.smooth, int(rule.generalized), classes, images
    blocks = launching.blocks_of_threads(images)
    arguments = sums, counts, weights, losses, slopes, *numbers
    launching.launch("dice_losses", blocks, launching.THREADS, *arguments)
    return fold.partial_of_leaves(losses, tree, LANES, shape=()), slopes


def dice_dp(p, labels, slopes, scale, counts):
    _, pixels, classes = pixels_of(p, "dice_dp")
    d = array.empty_like(p, np.float32)
    arrays = p, by_image(labels, "dice_dp"), counts, slopes
    blocks = launching.blocks_of_threads(p.size)
    numbers = *scale_of(scale), d, classes, pixels, p.size
    launching.launch("dice_dp", blocks, launching.THREADS, *arrays, *numbers)
    return d
