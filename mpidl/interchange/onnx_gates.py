"""Convert the weights of recurrent layers between ONNX and mpidl.

ONNX orders the gates of an LSTM as i, o, f, c, and those of a GRU as z, r, h. mpidl orders them as
i, f, g, o and r, z, n.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpidl.nn import layers as nn

# Numbers of mpidl's gates in ONNX's order, and of ONNX's gates in mpidl's order.
TO_ONNX = {nn.LSTM: (0, 3, 1, 2), nn.GRU: (1, 0, 2)}
FROM_ONNX = {nn.LSTM: (0, 2, 3, 1), nn.GRU: (1, 0, 2)}


def _reordered(array, gates):
    """Reorder the gates, which the first axis of an array contains."""
    parts = np.split(array, len(gates))
    return np.concatenate([parts[gate] for gate in gates])


def to_onnx(layer: nn.LSTM | nn.GRU, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ONNX's W (1, G, F), R (1, G, U) and B (1, 2G), where G is the size of all gates.

    Their names are weight, recurrent_weight and bias. F is C*W, in this order.
    """
    gates = TO_ONNX[type(layer)]
    written = {
        name: _reordered(arrays[name], gates).reshape(1, len(arrays[name]), -1)
        for name in ("weight", "recurrent_weight")
    }
    if layer.bias:
        bias = arrays["bias"]
        biases = bias, arrays.get("recurrent_bias", np.zeros_like(bias))
        written["bias"] = np.concatenate([_reordered(b, gates) for b in biases])[None]
    return written


def from_onnx(
    layer: nn.LSTM | nn.GRU, weight: np.ndarray, recurrent: np.ndarray, bias: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Return the learnables of a layer, given one direction of ONNX's W, R and B.

    The weight is (G, F). Raise ValueError if the arrays do not fit together.
    """
    gates, units = FROM_ONNX[type(layer)], layer.units
    size = len(gates) * units
    if weight.shape[:1] != (size,) or recurrent.shape != (size, units):
        raise ValueError(f"weights of the shapes {weight.shape} and {recurrent.shape}")
    arrays = {
        "weight": _reordered(weight, gates),
        "recurrent_weight": _reordered(recurrent, gates)[:, :, None, None],
    }
    if bias is None:
        return arrays
    if bias.shape != (2 * size,):
        raise ValueError(f"biases of the shape {bias.shape}")
    first, second = (_reordered(half, gates) for half in np.split(bias, 2))
    if isinstance(layer, nn.GRU):
        return {**arrays, "bias": first, "recurrent_bias": second}
    return {**arrays, "bias": first + second if second.any() else first}
