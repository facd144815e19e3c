"""Read and write weights in safetensors files; read them from model files and PyTorch's files.

A safetensors file has a header with the names, types and shapes of arrays, followed by the arrays.
The safetensors library checks the header against the size of the file before it reads arrays.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidl.errors import UserError
from mpidl.files import check_regular, unreadable, write_whole
from mpidl.interchange import input_pixels, timm_names, torch_file, weight_names
from mpidl.interchange.input_pixels import Choice
from mpidl.interchange.weight_names import LIBRARIES, Names
from mpidl.nn import Network
from mpidl.text import NAMES_IN_A_LINE, name_list, pip_install, printable
from mpidl.training.files import model_file

# Exceptions that damaged descriptions and changed arrays cause.
DAMAGES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError)
DAMAGES += (TypeError, ValueError, UserError)
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl")  # suffixes of PyTorch's files


def library(name: str, path: str | os.PathLike[str], extra: str) -> Any:
    """Import a library that a file format needs. Raise UserError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"{printable(path)}: expected the package {name.partition('.')[0]}, which is not "
            f"installed ({pip_install(extra)})"
        ) from None


def load_weights(
    net: Network,
    path: str | os.PathLike[str],
    names: Names = "mpidl",
    normalization: Choice = None,
) -> Network:
    """Load the learnables and the state of a network from a file.

    The file must contain exactly one array for each array of the learnables and the state. Arrays
    of any float type are converted to float32. The weight of a fully connected layer may also have
    the shape (K, C, H, W) of a convolution, and the input weight of an LSTM or GRU the shape
    (4U, C*W) or (3U, C*W) of PyTorch, whose two biases of an LSTM are added.

    If the network has no normalization, it gets the normalization that the weights expect: the
    caller's choice, the one that mpidl stored in the file, or the published one if the names
    identify a published network. Otherwise, every use of the network for images raises a UserError
    that lists the choices.

    Parameters
    ----------
    net : Network
        The network, in host memory. It is changed only if all arrays fit.
    path : path
        A safetensors file (`.safetensors`), a model file of mpidl (`.h5`), or a file of PyTorch
        (`.pth`, `.pt`, `.bin`), of which only the arrays are read and no code runs.
    names : str, dict or function
        The library that named the arrays ("mpidl", "torchvision", "timm" or "transformers"), a dict
        {name in the file: name in the network}, or a function that maps names in the file to names
        in the network. The function returns None for arrays to skip.
    normalization : str or Normalization, optional
        How to normalize images for these weights, as in `load_onnx`.

    Returns
    -------
    Network
        The same network.

    Raises
    ------
    UserError
        If the file cannot be read, if arrays are missing, superfluous or have other shapes, or if
        two arrays have the same name in the network. The message lists up to ten names per problem.
    TypeError
        If the network is on a GPU.
    """
    if net.on_device:
        raise TypeError("load_weights expects a network in host memory: net.to(None)")
    arrays, metadata = read(path)
    assign(net, arrays, names, path)
    if normalization is not None or net.normalization is None or not net.normalization.is_known:
        set_normalization(net, path, arrays, metadata, normalization)
    return net


def set_normalization(
    net: Network,
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str],
    choice: Choice = None,
) -> None:
    """Set the normalization of a network to that of the file with its weights."""
    stored = None
    if is_described(metadata):
        try:
            description = model_file.described(json.loads(metadata["description"]))
            name = description["normalization"]
            stored = input_pixels.described(metadata, name, net.input_shape)
        except DAMAGES as error:
            raise UserError(f"{printable(path)}: its description is damaged: {error}") from None
    net.normalization = input_pixels.of_file(path, net, arrays, choice=choice, stored=stored)


def is_described(metadata: Mapping[str, str]) -> bool:
    """Return whether the metadata of a file describe its network, as those of mpidl do."""
    return metadata.get("format") == "mpidl" and "description" in metadata


def assign(
    net: Network, arrays: Mapping[str, np.ndarray], names: Names, path: str | os.PathLike[str]
) -> Network:
    """Set the learnables and state of a network to arrays from a file (see `load_weights`)."""
    renamed = rename(net, arrays, names, path)
    errors = _differences(net, renamed)
    if errors:
        fitting = [
            repr(name) for name in LIBRARIES if name != names and fits(net, arrays, name, path)
        ]
        hint = f"; the names of {' and '.join(fitting)} fit (names=, --names)" if fitting else ""
        hint = hint or input_pixels.zoo_hint(arrays)
        raise UserError(f"{printable(path)}: {'; '.join(errors)}{hint}")
    with np.errstate(over="ignore"):
        values = {
            name: np.ascontiguousarray(renamed[name][1], np.float32).reshape(array.shape)
            for name, array in (net.parameters | net.state).items()
        }
    if names == "timm":
        timm_names.set_epsilon(net)
    net.parameters = {name: values[name] for name in net.parameters}
    net.state = {name: values[name] for name in net.state}
    net.unwhitened = []
    return net


def save_weights(net: Network, path: str | os.PathLike[str], names: str = "mpidl") -> None:
    """Write the learnables and the state of a network to a safetensors file.

    Like a model file, the file also describes the network and the preprocessing of images, in its
    metadata. With torchvision's names, the arrays equal the state_dict of torchvision's module.

    Parameters
    ----------
    net : Network
        The network.
    path : path
        The `.safetensors` file to write.
    names : {"mpidl", "torchvision"}
        Naming scheme of the arrays.

    Raises
    ------
    UserError
        If the file cannot be written, or the arguments are invalid.
    """
    if names not in ("mpidl", "torchvision"):
        raise UserError(f"names: expected mpidl or torchvision, found {names!r}")
    if not str(path).endswith(".safetensors"):
        raise UserError(f"{printable(path)}: expected a name that ends with .safetensors")
    safetensors = library("safetensors.numpy", path, "safetensors")
    net = net.on(None)
    arrays: dict[str, np.ndarray] = {}
    for name, array in (net.parameters | net.state).items():
        new_name = name
        if names == "torchvision":
            new_name, array = weight_names.torchvision_array(name, net, array)
        if new_name in arrays:
            raise UserError(f"{printable(path)}: two arrays would have the name {new_name}")
        arrays[new_name] = np.ascontiguousarray(array)
    if names == "torchvision":
        arrays |= weight_names.torchvision_additions(net)
    scaling = {} if net.normalization is None else net.normalization.arrays()
    metadata = _metadata(model_file.description_of(net), scaling)
    write_whole(path, safetensors.save(arrays, metadata))


def _metadata(description: Mapping[str, Any], scaling: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the metadata that describe the network in a safetensors file."""
    numbers = {name: array.tolist() for name, array in scaling.items()}
    texts = {"description": json.dumps(description), "normalization": json.dumps(numbers)}
    return {"format": "mpidl", **texts}


def read(path: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read a weight file, and return {name in the file: array} and the file's metadata.

    Raises UserError if the file cannot be read or is damaged.
    """
    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix in TORCH:
        return torch_file.read(path), {}
    if suffix == ".h5":
        try:
            tables, attributes = model_file.read(path)
        except model_file.Torn as error:
            raise UserError(f"{printable(path)}: not a model file: {error}") from error
        scaling = tables.get("normalization", {})
        arrays = tables.get("learnables", {}) | tables.get("state", {})
        return arrays, _metadata(attributes, scaling)
    if suffix != ".safetensors":
        raise UserError(
            f"{printable(path)}: expected a weight file *.safetensors, *.pth or *.h5, found "
            f"{suffix!r}"
        )
    safetensors = library("safetensors", path, "safetensors")
    try:
        check_regular(os.stat(path))
        with safetensors.safe_open(path, "numpy") as file:
            arrays = {name: _array(file, name, path) for name in file.keys()}
            return arrays, file.metadata() or {}
    except OSError as error:
        raise unreadable(path, error) from None
    except safetensors.SafetensorError as error:
        raise UserError(f"{printable(path)}: not a safetensors file: {error}") from None


def _array(file, name, path):
    kind = file.get_slice(name).get_dtype()
    if kind == "BF16":
        library("ml_dtypes", path, "safetensors")
    try:
        return file.get_tensor(name)
    except (AttributeError, TypeError, ValueError) as error:
        text = f"its type {kind} is not supported: {str(error):.100}"
        raise UserError(f"{printable(path)}: {printable(name)}: {text}") from None


def fits(
    net: Network, arrays: Mapping[str, np.ndarray], names: Names, path: str | os.PathLike[str]
) -> bool:
    """Return whether the arrays of a file fit a network under the naming scheme `names`."""
    try:
        return not _differences(net, rename(net, arrays, names, path))
    except UserError:
        return False


def rename(
    net: Network, arrays: Mapping[str, np.ndarray], names: Names, path: str | os.PathLike[str]
) -> dict[str, tuple[str, np.ndarray]]:
    """Return {name in the network: (name in the file, array)}.

    `load_weights` documents `names`. Raises UserError if two arrays have the same name in the
    network, or if the library is unknown.
    """
    translate = weight_names.rename(names, net)
    renamed: dict[str, tuple[str, np.ndarray]] = {}
    for name, array in arrays.items():
        new_name = translate(name)
        if new_name is None:
            continue
        if new_name in renamed:
            raise UserError(
                f"{printable(path)}: {printable(renamed[new_name][0])} and {printable(name)} are "
                f"both {printable(new_name)} in the network"
            )
        renamed[new_name] = name, array
    return weight_names.with_recurrent_arrays(net, renamed)


def _differences(net: Network, renamed: Mapping[str, tuple[str, np.ndarray]]) -> list[str]:
    """Return messages about arrays that are missing, superfluous, or of a wrong shape or type."""
    expected = net.parameters | net.state
    missing = [name for name in expected if name not in renamed]
    left_over = [name for new, (name, _) in renamed.items() if new not in expected]
    misfits = [
        f"{printable(name)} is {array.dtype} {array.shape}, the network has {expected[new].shape}"
        for new, (name, array) in renamed.items()
        if new in expected and not _fits(array, expected[new].shape)
    ]
    lines = []
    if missing:
        lines.append(f"the file lacks {name_list(missing)}")
    if left_over:
        lines.append(f"the network lacks {name_list(left_over)}")
    rest = len(misfits) - NAMES_IN_A_LINE
    return [*lines, *misfits[:NAMES_IN_A_LINE], *([f"{rest} more misfits"] if rest > 0 else [])]


def _fits(array, shape):
    """Return whether an array of a file can replace a network's array of the given shape."""
    is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
    is_dense = len(shape) == 2 and array.ndim == 4 and array.shape[0] == shape[0]
    is_same = _without_ones(array.shape) == _without_ones(shape)
    return is_float and (is_same or (is_dense and array.size == shape[0] * shape[1]))


def _without_ones(shape):
    """Return a shape without ones at its end: a 1x1 convolution may be stored as a linear layer."""
    return _without_ones(shape[:-1]) if shape and shape[-1] == 1 else shape
