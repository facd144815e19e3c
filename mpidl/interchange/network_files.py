"""Load and save networks in all supported file formats: model.h5, ONNX and safetensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import numpy as np

from mpidl.core.blocks import OneRank, from_images, share
from mpidl.data.formats.hdf5 import is_hdf5
from mpidl.errors import UserError
from mpidl.interchange import input_pixels, onnx_export, onnx_import, weight_names, weights
from mpidl.interchange.input_pixels import Choice, of_file
from mpidl.interchange.onnx_builder import MAX_VALUES
from mpidl.interchange.onnx_file import LARGEST
from mpidl.nn import Layer, Network, Softmax
from mpidl.nn.transfer import last_layer
from mpidl.text import printable
from mpidl.training.files import model_file

SUFFIXES = (".h5", ".onnx", ".safetensors")
IMAGES = 4  # number of images whose scores are compared
LIMIT = 1e-4  # largest accepted difference between scores, relative to the largest score

# A function that builds a network from the shape (C, H, W) of an image and the number of outputs.
Build: TypeAlias = Callable[[tuple[int, ...], int], Network]


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a path. Raise UserError if no network can be saved in such a file."""
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in SUFFIXES:
        raise UserError(
            f"{printable(path)}: expected a *.h5, *.onnx or *.safetensors file, found {suffix!r}"
        )
    return suffix


def load(
    path: str | os.PathLike[str],
    layers: Iterable[type[Layer]] = (),
    input_shape: tuple[int, int, int] | None = None,
    normalization: Choice = None,
) -> Network:
    """Load a network with its weights, class names and normalization.

    Raises UserError if the file cannot be read, or if it does not describe its network. The file
    ends in .h5, .onnx or .safetensors; a safetensors file must be one that `save_weights` wrote,
    because it describes the network. `input_shape` is required if an ONNX file does not fix it.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix not in weights.TORCH:
        suffix = ".h5" if is_hdf5(path) else suffix_of(path)
    if suffix == ".h5":
        net = model_file.load_model(path, layers)[0]
        stored = net.normalization
        net.normalization = of_file(path, net, {}, choice=normalization, stored=stored)
        return net
    if suffix == ".onnx":
        return onnx_import.load_onnx(path, input_shape, normalization=normalization)
    arrays, metadata = weights.read(path)
    if not weights.is_described(metadata):
        raise UserError(
            f"{printable(path)}: the file contains only arrays and no description of the network; "
            "--network NAME of mpidl.train and of mpidl.convert specifies it"
        )
    try:
        description = model_file.described(json.loads(metadata["description"]))
        _check_shape(description["input_shape"])
        net = model_file.network_of(description, input_pixels.stored_arrays(metadata), layers)
    except weights.DAMAGES as error:
        raise UserError(f"{printable(path)}: its network cannot be built: {error}") from None
    _check_size(net, path)
    names = "mpidl" if weights.fits(net, arrays, "mpidl", path) else "torchvision"
    weights.assign(net, arrays, names, path)
    stored = net.normalization
    net.normalization = of_file(path, net, arrays, choice=normalization, stored=stored)
    net.unwhitened = description.get("unwhitened", [])
    return net


def _check_shape(input_shape):
    if len(input_shape) != 3 or not all(0 < size <= LARGEST for size in input_shape):
        raise ValueError(f"images of shape {tuple(input_shape)}: expected (C, H, W)")


def _check_size(net, path):
    """Raise UserError if a layer computes more than `MAX_VALUES` values per image."""
    largest = max(math.prod(shape) for shape in (net.input_shape, *net.output_shapes))
    if largest > MAX_VALUES:
        raise UserError(
            f"{printable(path)}: a layer computes {largest} values per image, expected at most "
            f"{MAX_VALUES}"
        )


def load_into(
    path: str | os.PathLike[str],
    build: Build,
    input_shape: tuple[int, ...],
    outputs: int,
    normalization: Choice = None,
) -> Network:
    """Load the weights of a file into a network that the caller defines.

    `build(input_shape, outputs)` returns the network, whose learnables are overwritten; the two
    arguments are used if the file does not give them. The naming scheme of the arrays is detected.
    Class names, normalization and preprocessing are copied if the file has them. Raises UserError
    if the file cannot be read, or if its weights do not fit the network.
    """
    if os.fspath(path).lower().endswith(".onnx"):
        return _load_onnx_into(path, build, normalization)
    arrays, metadata = weights.read(path)
    description: Mapping = {}
    if weights.is_described(metadata):
        try:
            description = model_file.described(json.loads(metadata["description"]))
            input_shape = tuple(map(int, description["input_shape"]))
        except weights.DAMAGES as error:
            raise UserError(f"{printable(path)}: its description is damaged: {error}") from None
    net = _built(path, build, input_shape, outputs)

    def renamed(names):
        try:
            return weights.rename(net, arrays, names, path)
        except UserError:  # two arrays with the same name
            return {}

    expected = net.parameters.keys() | net.state.keys()
    names = max(weight_names.LIBRARIES, key=lambda names: len(renamed(names).keys() & expected))
    _, weight = renamed(names).get(f"{last_layer(net).name}.weight", (None, None))
    if weight is not None and weight.ndim and (len(weight),) != net.output_shape:
        net = _built(path, build, input_shape, len(weight))
    weights.assign(net, arrays, names, path)
    weights.set_normalization(net, path, arrays, metadata, normalization)
    if description:
        classes = description["classes"]
        if isinstance(classes, list) and len(classes) in (0, *net.output_shape[:1]):
            net.classes = tuple(map(str, classes))
        net.crop, net.preprocess = description.get("crop"), description.get("preprocess")
    return net


def _built(path, build, input_shape, outputs):
    """Call `build`. Raise UserError if it cannot build a network for images of this shape."""
    try:
        _check_shape(input_shape)
        net = build(input_shape, outputs)
    except (MemoryError, ValueError) as error:
        raise UserError(
            f"{printable(path)}: no network for images of shape {input_shape}: {error}"
        ) from None
    _check_size(net, path)
    return net


def _load_onnx_into(path, build, normalization):
    """Copy the weights of an ONNX file into a network that computes the same scores.

    The arrays are matched by name if the names agree, and by the order of the layers otherwise.
    """
    source = onnx_import.load_onnx(path, normalization=normalization)
    net = _built(path, build, source.input_shape, source.output_shape[0])
    for table in ("parameters", "state"):
        expected, arrays = getattr(net, table), getattr(source, table)
        values = list(arrays.values())
        if expected.keys() == arrays.keys():
            values = [arrays[name] for name in expected]
        if [array.shape for array in expected.values()] != [array.shape for array in values]:
            raise UserError(
                f"{printable(path)}: expected the {table} of the network, {_shapes(expected)}, "
                f"found {_shapes(arrays)}{input_pixels.zoo_hint(source.parameters)}"
            )
        setattr(net, table, dict(zip(expected, values, strict=True)))
    net.unwhitened = []
    net.normalization, net.classes = source.normalization, source.classes
    net.crop, net.preprocess = source.crop, source.preprocess
    difference = score_difference(_without_softmax(source), _without_softmax(net))
    if not difference <= LIMIT:
        raise UserError(
            f"{printable(path)}: expected the layers of the file, found a network whose scores "
            f"differ by {difference:.1g} of the largest score"
        )
    return net


def _shapes(arrays):
    """Describe the first few arrays of {name: array} in one line."""
    texts = [f"{name} {array.shape}" for name, array in arrays.items()]
    rest = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    return (", ".join(texts[:4]) or "none") + rest


def _without_softmax(net):
    return net.up_to(net.reads[-1][0]) if isinstance(net.layers[-1], Softmax) else net


def score_difference(net: Network, other: Network) -> float:
    """Return the largest difference between two networks' scores, relative to the largest score.

    The scores are computed for images of random pixels, which each network normalizes.
    """
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (IMAGES, *net.input_shape), np.uint8)
    batch = share(IMAGES, OneRank())
    scores = []
    for network in (net, other):
        images = pixels / np.float32(255)
        if network.normalization is not None and network.normalization.is_known:
            images = network.normalization(pixels)
        scores.append(network(from_images(images, batch)).local().astype(np.float64))
    largest = max(abs(scores[0]).max(), np.finfo(np.float32).tiny)
    return float(abs(scores[1] - scores[0]).max() / largest)


def save(net: Network, path: str | os.PathLike[str], names: str = "mpidl") -> None:
    """Save a network in the format given by the suffix of `path`.

    Raises UserError if the file cannot be written. `names` is the naming scheme of the arrays in a
    safetensors file.
    """
    suffix = suffix_of(path)
    if suffix == ".h5":
        model_file.save_model(path, net)
    elif suffix == ".onnx":
        onnx_export.save_onnx(net, path)
    else:
        weights.save_weights(net, path, names)
