"""Translate the array names of other libraries' weight files to the array names of a network.

In PyTorch's files, an array name such as "layer1.0.conv1.weight" consists of a module name and the
name of an array in this module. The corresponding layer of mpidl has the module's name with "_"
instead of ".". Tables translate the module names in timm and in Hugging Face's transformers to the
names in torchvision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from mpidl.errors import UserError
from mpidl.interchange import timm_names
from mpidl.nn import Network
from mpidl.nn.layers import (
    GRU,
    LSTM,
    BatchNorm,
    Conv2D,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    PReLU,
    Scale,
)
from mpidl.text import did_you_mean

# A function that maps an array name in a file to the name in a network, or to None to skip it.
Rename: TypeAlias = Callable[[str], "str | None"]
Names: TypeAlias = "str | Mapping[str, str] | Rename"

# {array name in PyTorch's normalization modules: name in mpidl}. mpidl has no array for COUNTER.
NORMALIZATION = {
    "weight": "gamma",
    "bias": "beta",
    "running_mean": "mean",
    "running_var": "variance",
}
COUNTER = "num_batches_tracked"
# {array name in PyTorch's LSTM and GRU, without its suffix: name in mpidl}. A suffix is a layer of
# mpidl: weight_ih_l1_reverse of the module rnn is an array of the layer rnn_l1_reverse, and
# weight_ih_l0 of rnn_l0 or rnn. The two biases of an LSTM are added.
RECURRENT = {
    "weight_ih": "weight",
    "weight_hh": "recurrent_weight",
    "bias_ih": "bias",
    "bias_hh": "recurrent_bias",
}
RECURRENT_ARRAY = r"(weight_ih|weight_hh|bias_ih|bias_hh)_(l\d{1,4}(?:_reverse)?)"
RECURRENT_LAYER = r"(.+)_(l\d{1,4}(?:_reverse)?)"
SLOPE = {"weight": "slope"}  # {array name in PyTorch's PReLU: name in mpidl}
LAYER_SCALE = ("layer_scale", "gamma")  # names of ConvNeXt's scale in torchvision and timm
LINEAR = r"features_\d+_\d+_block_[35]"  # 1x1 convolutions that are linear layers in torchvision
AUXILIARY = ("AuxLogits.", "aux_classifier.")  # torchvision's classifiers that only help training
# Patterns of layer names whose "_" does not all stand for a "." of torchvision, and its names.
UNDERSCORES = (
    (r"(Mixed_\w\w)_(\w+)_(conv|bn)", r"\1.\2.\3"),
    (r"(Conv2d_\w+)_(conv|bn)", r"\1.\2"),
)

Table: TypeAlias = Sequence[tuple[str, "str | Callable[[re.Match[str]], str]"]]


def _stage(suffix: Callable[[re.Match[str]], str]) -> Callable[[re.Match[str]], str]:
    """Return a replacement function for a pattern that begins with `_STAGE`.

    The first group is the index of the stage, which starts at 0 in the file and at 1 in
    torchvision.
    """
    return lambda match: f"layer{int(match[1]) + 1}.{match[2]}.{suffix(match)}"


_STAGE = r"resnet\.encoder\.stages\.(\d{1,4})\.layers\.(\d{1,4})\."
# {library: [(pattern of a module name, torchvision's name)]}. Other modules keep their names.
MODULES: dict[str, Table] = {
    "torchvision": (  # the first files of DenseNet
        (r"(denselayer\d{1,4}\.(?:norm|conv))\.([12])", r"\1\2"),
    ),
    "timm": (
        (r"pre_logits\.fc1", "classifier.0"),
        (r"pre_logits\.fc2", "classifier.3"),
    ),
    "transformers": (
        (r"resnet\.embedder\.embedder\.convolution", "conv1"),
        (r"resnet\.embedder\.embedder\.normalization", "bn1"),
        (
            _STAGE + r"layer\.(\d{1,4})\.convolution",
            _stage(lambda match: f"conv{int(match[3]) + 1}"),
        ),
        (
            _STAGE + r"layer\.(\d{1,4})\.normalization",
            _stage(lambda match: f"bn{int(match[3]) + 1}"),
        ),
        (_STAGE + r"shortcut\.convolution", _stage(lambda match: "downsample.0")),
        (_STAGE + r"shortcut\.normalization", _stage(lambda match: "downsample.1")),
        (r"classifier\.1", "fc"),
    ),
}
LIBRARIES = ("mpidl", *MODULES)


def rename(names: Names, net: Network) -> Rename:
    """Return the function that maps array names in a file to array names in a network.

    `names` is the library that named the arrays ("mpidl", "torchvision", "timm" or "transformers"),
    a dict, or a function that returns None for arrays to skip. The network shows which layers are
    batch normalization and PReLU layers, whose array names differ from PyTorch's names. Raises
    UserError if the library is unknown.
    """
    if callable(names):
        return names
    if isinstance(names, Mapping):
        return lambda name: names.get(name, name)
    if names == "mpidl":
        return lambda name: name
    if names not in MODULES:
        raise UserError(
            f"names: expected one of {', '.join(LIBRARIES)}, a dict or a function, found "
            f"{names!r}{did_you_mean(names, LIBRARIES)}"
        )

    def of_library(name):
        module, _, array = name.rpartition(".")
        for pattern, replacement in MODULES[names]:
            module = re.sub(rf"{pattern}\Z", replacement, module) if module else module
        renamed = timm_names.layer_of(module, net) if names == "timm" else None
        layer = renamed or module.replace(".", "_")
        if array == COUNTER or module.startswith(AUXILIARY):
            return None
        if array in LAYER_SCALE and f"{layer}_layer_scale.scale" in net.parameters:
            return f"{layer}_layer_scale.scale"
        recurrent = re.fullmatch(RECURRENT_ARRAY, array)
        if recurrent is not None:
            part = f"{layer}_{recurrent[2]}"
            is_alone = recurrent[2] == "l0" and part not in net.layer_names
            return f"{layer if is_alone else part}.{RECURRENT[recurrent[1]]}"
        if f"{layer}.gamma" in net.parameters:
            array = NORMALIZATION.get(array, array)
        elif f"{layer}.slope" in net.parameters:
            array = SLOPE.get(array, array)
        return f"{layer}.{array}"

    return of_library


def with_recurrent_arrays(
    net: Network, renamed: Mapping[str, tuple[str, np.ndarray]]
) -> dict[str, tuple[str, np.ndarray]]:
    """Convert PyTorch's arrays of recurrent layers to those of the network.

    `renamed` and the result are {name in the network: (name in the file, array)}. The input weight
    (4U, F) becomes filters (4U, C, 1, W), and the two biases of an LSTM become their sum, or are
    removed if one is missing. Other arrays are not changed.
    """
    converted = dict(renamed)
    for layer in net.layers:
        if isinstance(layer, LSTM | GRU):
            key = f"{layer.name}.weight"
            name, array = renamed.get(key, ("", np.zeros(0)))
            shape = net.parameters[key].shape
            if array.shape == (shape[0], shape[1] * shape[3]):
                converted[key] = name, array.reshape(shape)
        if isinstance(layer, LSTM):
            keys = [f"{layer.name}.{name}" for name in ("bias", "recurrent_bias")]
            biases = [renamed[key] for key in keys if key in renamed]
            if any(re.search(rf"(\A|\.){RECURRENT_ARRAY}\Z", name) for name, _ in biases):
                converted = {k: entry for k, entry in converted.items() if k not in keys}
                converted |= {keys[0]: _sum(biases)} if len(biases) == 2 else {}
    return converted


def _sum(biases):
    """Return (name, sum) of [(name, array), ...]. If an array is no vector, return it instead."""
    for name, array in biases:
        is_float = array.dtype.kind == "f" or array.dtype.name == "bfloat16"
        if not is_float or array.ndim != 1 or len(array) != len(biases[0][1]):
            return name, array
    return biases[0][0], np.sum([array.astype(np.float64) for _, array in biases], axis=0)


def torchvision_additions(net: Network) -> dict[str, np.ndarray]:
    """Return PyTorch's arrays that mpidl's layers lack: {name: zeros}.

    These are the counters of batch normalization, and the second biases of an LSTM.
    """
    arrays = {}
    for layer in net.layers:
        if isinstance(layer, BatchNorm):
            arrays[f"{_module_of(str(layer.name))}.{COUNTER}"] = np.zeros((), np.int64)
        if isinstance(layer, LSTM) and layer.bias:
            name = torchvision_name(f"{layer.name}.recurrent_bias", net)
            arrays[name] = np.zeros_like(net.parameters[f"{layer.name}.bias"])
    return arrays


def torchvision_name(name: str, net: Network) -> str:
    """Return torchvision's name of an array, "layer1.0.bn1.weight" for "layer1_0_bn1.gamma"."""
    layer, _, array = name.rpartition(".")
    if isinstance(net[layer], BatchNorm | GroupNorm | InstanceNorm | LayerNorm):
        array = next(key for key, value in NORMALIZATION.items() if value == array)
    elif isinstance(net[layer], PReLU):
        array = "weight"
    elif isinstance(net[layer], LSTM | GRU):
        match = re.fullmatch(RECURRENT_LAYER, layer)
        layer, suffix = (match[1], match[2]) if match else (layer, "l0")
        array = f"{next(key for key, value in RECURRENT.items() if value == array)}_{suffix}"
    return f"{_module_of(layer)}.{array}"


def torchvision_array(name: str, net: Network, array: np.ndarray) -> tuple[str, np.ndarray]:
    """Return torchvision's name and shape of an array of a network."""
    layer, _, kind = name.rpartition(".")
    if isinstance(net[layer], Conv2D) and kind == "weight" and re.fullmatch(LINEAR, layer):
        array = array.reshape(array.shape[:2])
    if isinstance(net[layer], LSTM | GRU) and array.ndim == 4:
        array = array.reshape(len(array), -1)
    if isinstance(net[layer], Scale) and layer.endswith("_layer_scale"):
        module = _module_of(layer.removesuffix("_layer_scale"))
        return f"{module}.{LAYER_SCALE[0]}", array.reshape(-1, 1, 1)
    return torchvision_name(name, net), array


def _module_of(layer: str) -> str:
    """Return the name of torchvision's module, such as layer1.0.bn1 for the layer layer1_0_bn1."""
    for pattern, module in UNDERSCORES:
        if re.fullmatch(pattern, layer):
            return re.sub(pattern, module, layer)
    return layer.replace("_", ".")
