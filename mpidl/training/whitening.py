"""Compute the filters of a whitening convolution from patches of the training images.

Each filter is a principal axis of the patches, divided by the standard deviation along this axis.
The outputs of the layer are uncorrelated, and have mean 0 and variance 1.

The filters have the same bytes on all machines and on any number of ranks. Pixels are rounded to
integers of 12 bits, so sums of products of pixels are exact in any order. `eigen` uses only the
basic operations of IEEE 754, because the rounding of LAPACK depends on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from mpidl.core import keyed
from mpidl.core.blocks import OneRank
from mpidl.data.array_datastore import as_datastore
from mpidl.data.checks import advising, read_images
from mpidl.data.datastore import Datastore
from mpidl.data.transforms.sizes import centred
from mpidl.errors import UserError
from mpidl.files import call_together
from mpidl.nn import Conv2D, Network, graph
from mpidl.nn.network_check import need_network
from mpidl.ops import check

IMAGES = 4096  # number of training images whose patches are used
CHUNK = 256  # number of images that the ranks read together at a time
BITS = 11  # number of bits of the absolute value of a rounded pixel
POSITIONS = 1 << 14  # most patches in a matrix product, unless a single image has more patches
EPSILON = 5e-4  # this fraction of the pixels' mean variance is added to the variance of each axis
SWEEPS = 60  # largest number of sweeps in `eigen`; 27 x 27 matrices need 8 sweeps


def layers_to_whiten(net: Network) -> list[Conv2D]:
    """Return the layers in `Network.unwhitened`.

    Parameters
    ----------
    net : Network
        The network.

    Returns
    -------
    list of Conv2D
        The layers, in the order of the network.

    Raises
    ------
    UserError
        If such a layer does not read the images, or if its filters are larger than the images.
    """
    layers, unwhitened = list[Conv2D](), net.unwhitened
    for layer, reads in zip(net.layers, net.reads, strict=True):
        if layer.name not in unwhitened or not isinstance(layer, Conv2D):
            continue
        if reads != (graph.IMAGES,):
            raise UserError(
                f"layer {layer.name}: weight_initializer whitening: expected a layer that reads "
                f"the images, found one that reads {', '.join(reads)}"
            )
        if min(_positions(layer, net.input_shape)) < 1:
            raise UserError(
                f"layer {layer.name}: weight_initializer whitening: expected filters that fit into "
                f"images of shape {net.input_shape}, found size {layer.size}"
            )
        layers.append(layer)
    return layers


def whiten(net: Network, datastore: Datastore, world: Any = None) -> None:
    """Set the initial weights of the layers with `weight_initializer="whitening"`. Collective.

    The patches are parts of the normalized images, with the size of the layer's filters. Each
    filter is a principal axis of the patches, divided by the standard deviation along this axis.
    Axes with larger deviations come first. If there are more filters than axes, the remaining
    filters are the negatives of the first filters, for a ReLU that follows the layer. If the layer
    has a bias, the bias subtracts the mean patch.

    `dl.train` calls this function after it has computed the normalization. A layer keeps its
    weights if they were assigned or loaded from the file of a trained network, even if all of them
    are 0 (see `Network.unwhitened`).

    Parameters
    ----------
    net : Network
        The network, in host memory, with its normalization and crop.
    datastore : Datastore
        The training images. The patches come from 4,096 random images, which the seed of the
        network determines. If there are fewer images, the patches come from all images.
    world : World, optional
        The ranks that share the work. The default is only this rank.

    Raises
    ------
    UserError
        On all ranks, if a layer does not read the images, if the datastore is empty, if its images
        have other channels than the network or are too small, or if an image cannot be read.

    Notes
    -----
    A frozen whitening layer speeds up the first epochs. See Page, "How to train your ResNet", 2019,
    and Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, section 3.2.
    """
    need_network(net)
    datastore = as_datastore(datastore, "training images")
    shape, expected = datastore.image_shape, net.input_shape
    if not len(datastore) or shape[0] != expected[0] or min(np.subtract(shape, expected)) < 0:
        raise UserError(
            f"whiten: expected images of shape {expected} or larger, found {len(datastore)} of "
            f"shape {shape}"
        )
    for layer in layers_to_whiten(net):
        key = f"{layer.name}.weight"
        shape = net.parameters[key].shape
        mean, covariance = _patch_moments(net, layer, datastore, world)
        filters, bias = whitening_filters(mean, covariance, shape[0])
        biases = {f"{layer.name}.bias": bias} if layer.bias else {}
        net.parameters = {**net.parameters, key: filters.reshape(shape), **biases}
    net.unwhitened = []


def whitening_filters(
    mean: np.ndarray, covariance: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the filters and biases that whiten patches with the given mean and covariance.

    Parameters
    ----------
    mean : ndarray
        Mean patch, float64 (D,).
    covariance : ndarray
        Covariance of the patches, float64 (D, D).
    count : int
        Number of filters K, from 1 to 2 D.

    Returns
    -------
    filters : ndarray
        Filters, float32 (K, D).
    bias : ndarray
        Biases, float32 (K,).
    """
    size = len(mean)
    variances, axes = eigen(covariance)
    epsilon = EPSILON * math.fsum(np.diag(covariance)) / size or 1.0
    filters = axes / np.sqrt(np.maximum(variances, 0) + epsilon)[:, None]
    filters = np.concatenate([filters, -filters])[:count]
    bias = np.array([-math.fsum(row) for row in filters * mean])
    return filters.astype(np.float32), bias.astype(np.float32)


def eigen(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eigenvalues and eigenvectors of a symmetric matrix, by Jacobi's method.

    Parameters
    ----------
    matrix : ndarray
        Symmetric matrix, float64 (D, D).

    Returns
    -------
    values : ndarray
        Eigenvalues (D,), the largest first.
    vectors : ndarray
        Eigenvectors of length 1, one per row, (D, D). In each eigenvector, the component with the
        largest absolute value is positive.

    Notes
    -----
    See Golub and Van Loan, "Matrix computations", 2013, section 8.5.
    """
    a, vectors = np.array(matrix, np.float64), np.eye(len(matrix))
    scale = float(abs(a).max(initial=0))
    for _ in range(SWEEPS):
        is_diagonal = True
        for p in range(len(a) - 1):
            for q in range(p + 1, len(a)):
                if abs(a[p, q]) <= 1e-17 * scale:
                    a[p, q] = a[q, p] = 0
                    continue
                is_diagonal = False
                _rotate(a, vectors, p, q)
        if is_diagonal:
            break
    order = np.argsort(-np.diag(a), kind="stable")
    vectors = vectors[order]
    largest = vectors[np.arange(len(a)), abs(vectors).argmax(axis=1)]
    return np.diag(a)[order], vectors * np.where(largest < 0, -1.0, 1.0)[:, None]


def _rotate(a, vectors, p, q):
    """Rotate axes p and q in place, so that a[p, q] becomes zero."""
    tau = float(a[q, q] - a[p, p]) / (2 * float(a[p, q]))
    t = math.copysign(1.0, tau) / (abs(tau) + math.sqrt(1 + tau * tau))
    c = 1 / math.sqrt(1 + t * t)
    s = t * c
    for table in (a, a.T, vectors):
        row_p, row_q = table[p].copy(), table[q].copy()
        table[p], table[q] = c * row_p - s * row_q, s * row_p + c * row_q
    a[p, q] = a[q, p] = 0


def _patch_moments(net, layer, datastore, world):
    """Return the mean (D,) and the covariance (D, D) of the patches for a layer."""
    world = OneRank() if world is None else world
    n = len(datastore)
    indices = np.sort(keyed.permutation(n, net.seed, "whitening")[:IMAGES])
    size = net.parameters[f"{layer.name}.weight"].shape
    total = np.zeros((math.prod(size[1:]) + 1,) * 2)
    for start in range(0, len(indices), CHUNK):
        share = indices[start : start + CHUNK][world.rank :: world.size]
        if world.size == 1:
            images = _normalized(net, datastore, share)
        else:
            images = call_together(world, partial(_normalized, net, datastore, share))
        peak = float(abs(images).max(initial=0))
        peak = peak if world.size == 1 else world.gop("max", peak)
        scale = math.ldexp(1.0, BITS - math.frexp(peak)[1])  # a power of two, so scaling is exact
        products = np.zeros(total.shape, np.int64)
        for patches in _patches(np.rint(images * scale), layer, size):
            products += (patches @ patches.T).astype(np.int64)
        products = products if world.size == 1 else world.gop("sum", products)
        units = np.full(len(total), 1 / scale)
        units[-1] = 1  # the last row of the patches consists of ones
        total += products * units[:, None] * units
    count = total[-1, -1]
    mean = total[:-1, -1] / count
    return mean, total[:-1, :-1] / count - mean[:, None] * mean


def _positions(layer, shape):
    """Return the numbers of rows and columns at which a filter lies inside images (C, H, W)."""
    size = check.pair(str(layer.name), "size", layer.size, 1)
    dilation = check.pair(str(layer.name), "dilation", layer.dilation, 1)
    return [n - d * (m - 1) for n, m, d in zip(shape[1:], size, dilation, strict=True)]


def _normalized(net, datastore, indices):
    """Return images (n, C, P, Q) as the network reads them, float64."""
    shape = net.input_shape
    if not len(indices):
        return np.zeros((0, *shape))
    with advising():
        images = read_images(datastore, indices)
    top, left = centred(images.shape[1:], shape[1:])
    images = images[:, :, top : top + shape[1], left : left + shape[2]]
    if net.normalization is not None:
        return net.normalization(images).astype(np.float64)
    return images / 255 if images.dtype == np.uint8 else images.astype(np.float64)


def _patches(images: np.ndarray, layer: Conv2D, size: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield matrices (D + 1, patches): each column contains a patch of an image, and a 1."""
    _, channels, rows, columns = size
    down, across = check.pair(str(layer.name), "dilation", layer.dilation, 1)
    height, width = _positions(layer, images.shape[1:])
    step = max(1, POSITIONS // (height * width))
    for first in range(0, len(images), step):
        part = images[first : first + step]
        views = [
            part[:, c, down * i : down * i + height, across * j : across * j + width].ravel()
            for c in range(channels)
            for i in range(rows)
            for j in range(columns)
        ]
        yield np.stack([*views, np.ones(views[0].size)])
