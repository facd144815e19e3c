"""Find the normalization of images that the network of a file of another library expects.

Such a file contains the weights, but not what its library did to the images before. The
normalization is never guessed. It comes from the caller, from constants at the beginning of an ONNX
graph, or from names that identify published weights. Otherwise it is `normalize.unknown`, and every
use of the network raises an error that lists the choices.
"""

from __future__ import annotations

import collections
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpidl.data.transforms import normalize
from mpidl.data.transforms.normalize import Normalization, unknown
from mpidl.errors import UserError
from mpidl.interchange import weight_names
from mpidl.nn import Conv2D, Network, Pad2D, graph, zoo
from mpidl.text import printable

Choice: TypeAlias = "str | Normalization | None"
IMAGENET_CLASSES = 1000
# What the pixels of a graph that normalizes them itself may be.
RANGES = ("none", "rescale-zero-one", "rescale-symmetric")
# {pattern of the name of a model in keras.applications: the normalization of its images}. Only
# TensorFlow calls an operation Conv2D: a module of PyTorch may have the same name as a model.
KERAS = {
    r"vgg(16|19)|resnet(50|101|152)": "caffe",
    r"densenet(121|169|201)": "imagenet",
    r"resnet(50|101|152)v2|mobilenet(v2)?_[0-9.]+_[0-9]+|xception|inception(_resnet)?_v[23]": (
        "rescale-symmetric"
    ),
}


# {network of torchvision and timm: its normalization}; those of the others are "imagenet".
# torchvision's network begins with a map from "imagenet" to these pixels.
PIXELS = {"inception_v3": "0.5,0.5,0.5/0.5,0.5,0.5"}


class Scaling(NamedTuple):
    """The map (image - centre) / divisor at the beginning of a graph, in arrays of 3 axes."""

    centre: np.ndarray
    divisor: np.ndarray

    def largest_pixel(self) -> int | None:
        """Return 255 or 1, the largest pixel that the numbers are made for, or None if unclear."""
        centre, divisor = self.centre, abs(self.divisor)
        if not ((centre >= 0).all() and (centre <= 255).all()):
            return None
        if (centre > 1).any() or (not centre.any() and (divisor >= 100).all()):
            return 255
        scales = centre.any() or (divisor != 1).any()
        return 1 if scales and (divisor <= 1).all() else None

    def after(self, first: Normalization) -> Normalization:
        """Return the normalization that computes `first` and then this map.

        It has the name of `first`. If `first` divides 8-bit pixels by 255, the result is
        MEAN/STD, which refuses other images, unless that name cannot express its numbers.
        """
        shape = np.broadcast_shapes(self.centre.shape, self.divisor.shape)
        channels = shape[0]
        if first.centre is None or first.divisor is None:  # 8-bit pixels divided by 255
            before, scale = np.zeros(channels), np.full(channels, 255.0)
        else:
            before, scale = first.centre.astype(np.float64), first.divisor.astype(np.float64)
        before, scale = (v.reshape(channels, 1, 1) for v in (before, scale))
        arrays = np.broadcast_arrays(before + scale * self.centre, scale * self.divisor)
        centre, divisor = (np.array(array, np.float32) for array in arrays)
        if centre.shape[1:] == (1, 1):
            centre, divisor = centre.ravel(), divisor.ravel()
        name = first.name
        if first.centre is None:
            rows = (self.centre.ravel(), self.divisor.ravel())
            numbers = "/".join(",".join(f"{number:.6g}" for number in row) for row in rows)
            name = numbers if centre.ndim == 1 and normalize.is_numbers(numbers) else "zscore"
        return replace(first, name=name, centre=centre, divisor=divisor)


def scaling_of(pair: tuple[np.ndarray, np.ndarray] | None, channels: int) -> Scaling | None:
    """Return the Scaling of a graph with images of `channels` channels, or None without one."""
    if pair is None:
        return None
    centre, divisor, _ = np.broadcast_arrays(*pair, np.zeros((channels, 1, 1)))
    return Scaling(centre, divisor)


def choice_of(choice: str | Normalization, channels: int) -> Normalization:
    """Return the normalization that a caller chose, by name or as an object.

    Raises UserError if the name is unknown or depends on a training set.
    """
    if isinstance(choice, Normalization):
        return choice
    return replace(normalize.fixed(choice, channels), reason="as chosen")


def described(metadata: Mapping[str, str], name: str, shape: Sequence[int]) -> Normalization:
    """Return the normalization that mpidl stored as text. Raise ValueError if it is damaged."""
    result = normalize.read(name, stored_arrays(metadata), shape[0])
    if result.is_known:
        result.check(shape)
    return result


def stored_arrays(metadata: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return the arrays of a normalization that mpidl stored as text, or {}."""
    numbers = json.loads(metadata.get("normalization", "{}"))
    return {name: np.array(rows, np.float32) for name, rows in numbers.items()}


def of_file(
    path: str | os.PathLike[str],
    net: Network,
    arrays: Mapping[str, np.ndarray],
    *,
    choice: Choice = None,
    stored: Normalization | None = None,
    scaling: Scaling | None = None,
    nodes: Iterable[str] = (),
) -> Normalization:
    """Return the normalization for the network of a file.

    If the pixels are "caffe", the weights that read the channels are reversed, so that the network
    expects RGB. Raises UserError if the choice is invalid or does not fit the network. `choice` is
    the caller's, `stored` the normalization that mpidl stored in the file, and `scaling` what the
    graph itself does to the images first.
    """
    result, channels = None, net.input_shape[0]
    if stored is not None and stored.is_known:
        result = stored if choice is None else choice_of(choice, channels)
        result.check(net.input_shape)
        return result
    if choice is not None:
        result = choice_of(choice, channels)
        if scaling is not None and result.name not in RANGES:
            raise UserError(
                f"{printable(path)}: normalization {result.name}: the graph begins with a "
                f"normalization, so the choices are its pixels: {', '.join(RANGES)}"
            )
        result = result if scaling is None else scaling.after(result)
    elif scaling is not None:
        result = _in_graph(scaling, channels)
    elif channels == 3:
        result = _published(net, arrays, nodes)
    if result is None:
        return unknown(f"{printable(path)}: the file does not say how to normalize the images")
    if result.name == "caffe":
        _reverse_channels(net, path)
    result.check(net.input_shape)
    return result


def _in_graph(scaling, channels):
    """Return the normalization at the beginning of a graph, or None if its pixels are unclear."""
    largest = scaling.largest_pixel()
    if largest is None:
        return None
    reason = f"with which the graph begins, for pixels from 0 to {largest}"
    if largest == 1:
        return replace(scaling.after(Normalization()), reason=reason)
    pixels = normalize.no_normalization(channels)
    return replace(scaling.after(pixels), name="zscore", reason=reason)


def _published(net, arrays, nodes):
    """Return the published normalization of ImageNet's networks, or None for other files.

    The file must have 1000 classes and the names of the library, and for torchvision and timm the
    shapes of one of their networks.
    """
    if net.output_shape != (IMAGENET_CLASSES,):
        return None
    text = "\n".join((*nodes, *arrays))
    for pattern, name in KERAS.items():
        match = re.search(rf"(?:^|/)({pattern})/(?:[^/\n]+/)*(?:Conv2D|convolution)", text, re.M)
        if match is not None:
            reason = f"as in Keras' {match[1]} for {IMAGENET_CLASSES} classes, which the nodes name"
            return replace(normalize.fixed(name, 3), reason=reason)
    for name in zoo_networks(net.parameters):
        library = _library(name, arrays) if name in zoo.torchvision.NETWORKS else None
        if library is not None:
            reason = f"as in {library}'s {name} for {IMAGENET_CLASSES} classes, from the names and "
            reason += "shapes of the weights"
            return replace(normalize.fixed(PIXELS.get(name, "imagenet"), 3), reason=reason)
    return None


def _library(network, arrays):
    """Return the library whose names the arrays of a file have, or None."""
    net = zoo.NETWORKS[network](seed=None)
    expected = {name: _flat(array.shape) for name, array in net.parameters.items()}
    for library in weight_names.MODULES:
        translate = weight_names.rename(library, net)
        for name, array in arrays.items():
            is_weight = array.ndim > 1 and "." in name
            if is_weight and expected.get(translate(name) or "") == _flat(array.shape):
                return library
    return None


def zoo_networks(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of the zoo's networks whose weights have the shapes of these arrays.

    The number of outputs may differ. Biases and statistics are only counted, to prefer a network
    with or without batch normalization, because it may be part of the convolution before it.
    """
    shapes = collections.Counter(_flat(a.shape) for a in arrays.values() if a.ndim > 1)
    count = sum(a.ndim > 0 for a in arrays.values())
    names, complete = [], []
    for name, create in zoo.NETWORKS.items():
        net = create(seed=None)
        expected = collections.Counter(
            _flat(a.shape) for a in net.parameters.values() if a.ndim > 1
        )
        extra, missing = (list(c.elements()) for c in (shapes - expected, expected - shapes))
        is_other_head = len(extra) == len(missing) == 1 and extra[0][1] == missing[0][1]
        if extra == missing == [] or (is_other_head and missing[0][0] == net.output_shape[0]):
            names.append(name)
            if count in (len(net.parameters), len(net.parameters) + len(net.state)):
                complete.append(name)
    return complete or names


def zoo_hint(arrays: Mapping[str, np.ndarray]) -> str:
    """Return "; ..." with the zoo's networks that the arrays of a file fit, or ""."""
    names = [f"--network {name}" for name in zoo_networks(arrays)]
    return f"; the weights have the shapes of {' and of '.join(names)}" if names else ""


def _flat(shape):
    """Return (K, numbers per output): a dense layer may be stored as a convolution."""
    return shape[0], int(np.prod(shape[1:]))


def _reverse_channels(net, path):
    """Reverse the channels that the first convolutions read, so that images are RGB, not BGR."""
    images: set[Any] = {graph.IMAGES}
    for layer, reads in zip(net.layers, net.reads, strict=True):
        if not images.intersection(reads):
            continue
        if isinstance(layer, Pad2D):
            images.add(layer.name)
        elif isinstance(layer, Conv2D) and layer.groups == 1:
            name = f"{layer.name}.weight"
            net.parameters = net.parameters | {name: net.parameters[name][:, ::-1].copy()}
        else:
            raise UserError(
                f"{printable(path)}: normalization caffe: expected a convolution that reads BGR "
                f"images, found {layer.name} ({type(layer).__name__})"
            )
