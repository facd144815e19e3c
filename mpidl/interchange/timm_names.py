"""Translate timm's module names of networks whose structure it names differently.

timm calls the modules of a block by what they do (conv_pw, conv_dw, se.conv_reduce), and counts
blocks within stages. torchvision numbers all of them. So the convolutions and normalizations of a
block are matched by their order, which is the same in both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mpidl.nn import Network
from mpidl.nn.layers import BatchNorm, Conv2D
from mpidl.nn.transfer import last_layer

EPSILON = 1e-5  # of batch normalizations in timm's MobileNetV3; torchvision's have 0.001
# Modules of a block, in the order in which it computes them.
SEPARABLE = ("conv_dw", "se.conv_reduce", "se.conv_expand", "conv_pw")
INVERTED = ("conv_pw", "conv_dw", "se.conv_reduce", "se.conv_expand", "conv_pwl")
# (pattern of a module name of ConvNeXt, torchvision's name); {0} is twice the number of the stage.
CONVNEXT = (
    (r"stem\.(\d)", r"features.0.\1"),
    (r"stages\.(\d{1,4})\.downsample\.(\d)", r"features.{0}.\2"),
    (r"stages\.(\d{1,4})\.blocks\.(\d{1,4})", r"features.{1}.\2"),
    (r"stages\.(\d{1,4})\.blocks\.(\d{1,4})\.conv_dw", r"features.{1}.\2.block.0"),
    (r"stages\.(\d{1,4})\.blocks\.(\d{1,4})\.norm", r"features.{1}.\2.block.2"),
    (r"stages\.(\d{1,4})\.blocks\.(\d{1,4})\.mlp\.fc1", r"features.{1}.\2.block.3"),
    (r"stages\.(\d{1,4})\.blocks\.(\d{1,4})\.mlp\.fc2", r"features.{1}.\2.block.5"),
    (r"head\.norm", "classifier.0"),
)


def layer_of(module: str, net: Network) -> str | None:
    """Return the layer for a module of timm, or None if `module` follows no rule of this file."""
    if module in ("head.fc", "classifier", "fc"):
        return last_layer(net).name
    for pattern, name in CONVNEXT:
        match = re.fullmatch(pattern, module)
        if match is not None:
            stage = int(match[1]) if match.groups() and match[1].isdigit() else 0
            return match.expand(name).format(2 * stage, 2 * stage + 1).replace(".", "_")
    blocks = _blocks(net)
    if not blocks:
        return None
    last = f"features_{1 + max(int(name.split('_')[1]) for name in blocks)}"
    outer = {"conv_stem": "features_0_0", "bn1": "features_0_1", "bn2": f"{last}_1"}
    # In MobileNetV3, `conv_head` follows pooling, and a block contains the convolution before it.
    has_late_head = "classifier_3" in net.layer_names
    outer["conv_head"] = "classifier_0" if has_late_head else f"{last}_0"
    if module in outer:
        return outer[module]
    match = re.fullmatch(r"blocks\.(\d{1,4})\.(\d{1,4})\.(.+)", module)
    if match is None:
        return None
    stages = _stages(net, blocks)
    stage, number = int(match[1]), int(match[2])
    if stage == len(stages) and has_late_head:
        return {"conv": f"{last}_0", "bn1": f"{last}_1"}.get(match[3])
    if stage >= len(stages) or number >= len(stages[stage]):
        return None
    return _part(net, stages[stage][number], match[3])


def _blocks(net: Network) -> dict[str, list[str]]:
    """Return {block: its layers} of a network of inverted residual blocks, in their order."""
    blocks: dict[str, list[str]] = {}
    for name in net.layer_names:
        match = re.match(r"(features_\d+(?:_\d+)?)_(?:block|conv)_\d", name)
        if match is not None:
            blocks.setdefault(match[1], []).append(name)
    return blocks


def _stages(net: Network, blocks: dict[str, list[str]]) -> list[list[str]]:
    """Divide the blocks into stages: a stage begins with a block without a shortcut."""
    stages: list[list[str]] = []
    for name in blocks:
        if name in net.layer_names and stages:
            stages[-1].append(name)
        else:
            stages.append([name])
    return stages


def _part(net: Network, block: str, part: str) -> str | None:
    """Return the layer for a module of a block, such as "conv_dw", "bn2" or "se.conv_reduce"."""
    layers = [net[name] for name in _blocks(net)[block]]
    convolutions = [layer.name for layer in layers if isinstance(layer, Conv2D)]
    norms = [layer.name for layer in layers if isinstance(layer, BatchNorm)]
    number = re.fullmatch(r"bn([1-9])", part)
    if number is not None:
        index, names = int(number[1]) - 1, norms
    else:
        modules: Sequence[str] = SEPARABLE if len(norms) == 2 else INVERTED
        if len(convolutions) == len(norms):  # without a gate
            modules = [name for name in modules if not name.startswith("se.")]
        if part not in modules:
            return None
        index, names = modules.index(part), convolutions
    return str(names[index]) if index < len(names) else None


def set_epsilon(net: Network) -> None:
    """Give the batch normalizations of a MobileNetV3 timm's epsilon."""
    if _blocks(net) and "classifier_3" in net.layer_names:
        for layer in net.layers:
            if isinstance(layer, BatchNorm):
                layer.epsilon = EPSILON
