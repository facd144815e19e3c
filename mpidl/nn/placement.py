"""Move the learnables and the state of a network to a GPU or to host memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.nn import graph
from mpidl.nn.construction import layer_of
from mpidl.nn.layers import PReLU, Scale

if TYPE_CHECKING:
    from mpidl.nn.network import Network


def move(net: Network, device: Any) -> None:
    """Move the arrays of a network to a GPU or, if `device` is None, to host memory.

    This function implements `Network.to`.
    """
    if isinstance(device, str):
        raise TypeError(
            f"net.to: expected world.device after world.use_device('gpu'), or None for host "
            f"memory, got {device!r}"
        )
    if device is None:
        net._parameters = {name: np.asarray(a) for name, a in net._parameters.items()}
        net._state = {name: np.asarray(a) for name, a in net._state.items()}
        return
    from mpidl.backends.gpu import array

    net._parameters = array.together(net._parameters, image_shapes(net))
    net._state = array.together(net._state, {})


def image_shapes(net: Network) -> dict[str, tuple[int, ...]]:
    """Return {name of a learnable: shape of the images that its layer reads}.

    If a layer reads flattened images, the shape is the shape before flattening, because flattening
    does not change the memory layout on a GPU. There may be elementwise layers between the
    flattening and the layer.
    """
    with_learnables = {layer_of(key) for key in net.parameters}
    with_learnables -= {layer.name for layer in net.layers if isinstance(layer, (PReLU, Scale))}
    shapes, inputs = {graph.IMAGES: net.input_shape}, {}
    for layer, reads, shape in zip(net.layers, net.reads, net.output_shapes, strict=True):
        before = inputs[layer.name] = shapes[reads[0]]
        flat = len(shape) == 1 and shape[0] == math.prod(before)
        shapes[layer.name] = before if flat and layer.name not in with_learnables else shape
    return {key: inputs[layer_of(key)] for key in net.parameters}
