"""Load and save networks in any of the file formats: model.h5, ONNX, safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

import numpy as np

from mpidl.errors import UserError
from mpidl.interchange import onnx_export, onnx_import, weights
from mpidl.nn import Layer, Network
from mpidl.text import printable
from mpidl.training.files import model_file

SUFFIXES = (".h5", ".onnx", ".safetensors")


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a path; raise UserError if no supported format has it."""
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
) -> Network:
    """Load a network with its weights, class names and normalization.

    Parameters
    ----------
    path : path
        Path of an `.h5`, `.onnx` or `.safetensors` file. A safetensors file must be one that
        `save_weights` wrote, because it then describes the network.
    layers : iterable of Layer classes
        The custom layer classes in the network.
    input_shape : (C, H, W), optional
        Shape of an image if an ONNX file does not specify it.

    Raises
    ------
    UserError
        If the file cannot be read, or does not describe its network.
    """
    suffix = suffix_of(path)
    if suffix == ".h5":
        return model_file.load_model(path, layers)[0]
    if suffix == ".onnx":
        return onnx_import.load_onnx(path, input_shape)
    arrays, metadata = weights.read(path)
    if metadata.get("format") != "mpidl" or "description" not in metadata:
        raise UserError(
            f"{printable(path)}: the file contains only arrays and no description of the network; "
            "specify the network with --network NAME"
        )
    try:
        scaling = {
            key: np.array(numbers, np.float32)
            for key, numbers in json.loads(metadata.get("normalization", "{}")).items()
        }
        description = model_file.described(json.loads(metadata["description"]))
        net = model_file.network_of(description, scaling, layers)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError, UserError) as error:
        raise UserError(f"{printable(path)}: its network cannot be built: {error}") from None
    names = "mpidl" if weights.fits(net, arrays, "mpidl", path) else "torchvision"
    return weights.load_weights(net, path, names)


def save(net: Network, path: str | os.PathLike[str], names: str = "mpidl") -> None:
    """Save a network in the format given by the suffix of `path`.

    Parameters
    ----------
    net : Network
        The network.
    path : path
        Path of an `.h5`, `.onnx` or `.safetensors` file.
    names : {"mpidl", "torchvision"}
        Naming scheme for the arrays in a safetensors file; ignored for the other formats.

    Raises
    ------
    UserError
        If the file cannot be written.
    """
    suffix = suffix_of(path)
    if suffix == ".h5":
        model_file.save_model(path, net)
    elif suffix == ".onnx":
        onnx_export.save_onnx(net, path)
    else:
        weights.save_weights(net, path, names)
