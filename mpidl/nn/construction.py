"""Construct networks: name, build and check layers, and create the layers of a model file."""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from mpidl.nn import graph, layers
from mpidl.nn.layers import Built, Layer
from mpidl.nn.summary import times
from mpidl.ops import check


def name_layers(unnamed: Iterable[Layer]) -> list[Layer]:
    """Copy the layers, and name each copy that has no name.

    A new name is the lower-case layer type followed by a number, such as conv1 or relu2. Raises
    TypeError if the argument is not a list of layers. Raises ValueError if the list is empty, or if
    a name is not unique or contains "." or "/".
    """
    if isinstance(unnamed, Layer):
        raise TypeError(f"expected a list of layers, got a single {type(unnamed).__name__}")
    if isinstance(unnamed, str) or not isinstance(unnamed, Iterable):
        raise TypeError(f"expected a list of layers, got {unnamed!r}")
    if not unnamed:
        raise ValueError("expected at least one layer")
    copies: list[Any] = []
    counts: dict[str, int] = {}
    for layer in unnamed:
        if not isinstance(layer, Layer):
            hint = f": write {layer.__name__}(...)" if isinstance(layer, type) else ""
            raise TypeError(f"expected a list of layers, got {layer!r} in it{hint}")
        layer = copy.copy(layer)
        kind = type(layer).__name__.lower().removesuffix("2d")
        counts[kind] = counts.get(kind, 0) + 1
        layer.name = layer.name or f"{kind}{counts[kind]}"
        copies.append(layer)
    occurrences = collections.Counter(layer.name for layer in copies)
    for name in occurrences:
        if not isinstance(name, str) or occurrences[name] > 1 or "." in name or "/" in name:
            raise ValueError(f"layer names must be unique strings without '.' or '/', got {name!r}")
        if name == graph.IMAGES:
            raise ValueError(
                f"{name!r} is the name of the network's input: no layer can have that name"
            )
    return copies


def build_layer(layer: Layer, reads: Sequence[tuple[str, tuple[int, ...]]]) -> Built:
    """Build a layer, and check its flags and its factors of learning rate and L2 regularization.

    Raises ValueError if the layer cannot read the shapes, if a flag is neither True nor False, or
    if a factor is negative or not finite.
    `reads` has the name and the shape of each output that the layer reads.
    """
    shapes = tuple(shape for _, shape in reads)
    try:
        for f in fields(layer):
            value = getattr(layer, f.name)
            if f.type in (bool, "bool") and not isinstance(value, bool):
                raise ValueError(f"{layer.name}: {f.name} must be True or False, got {value!r}")
        built = layer.build(shapes[0] if graph.input_names(layer) is None else shapes)
    except ValueError as error:
        inputs = ", ".join(f"{name}: {times(shape)}" for name, shape in reads)
        raise ValueError(f"{error} ({layer.name} reads {inputs})") from error
    for learnable in built.learnables:
        for value in layer.factors(learnable):
            if not (check.are_numbers(value) and value >= 0 and math.isfinite(value)):
                raise ValueError(
                    f"{layer.name}: factors of learning rate and L2 must be at least 0, got "
                    f"{value!r} for {learnable}"
                )
    return built


def initial_arrays(
    layer: Layer, needs: Mapping[str, tuple[tuple[int, ...], Any]], seed: int | None
) -> dict[str, np.ndarray]:
    """Return the initial learnables or state of a layer: {"conv1.weight": float32 array, ...}.

    `needs` is the attribute `learnables` or `state` of the layer's `Built`. If the seed is None,
    all values are 0.
    """
    arrays = {}
    for name, (size, initial) in needs.items():
        key = f"{layer.name}.{name}"
        if seed is None:
            arrays[key] = np.zeros(size, np.float32)
            continue
        value = initial(seed, key, size) if callable(initial) else initial
        arrays[key] = np.full(size, value, np.float32)
    return arrays


def layers_of_spec(
    specs: Iterable[Mapping[str, Any]], layer_types: Iterable[type[Layer]] = ()
) -> list[Layer]:
    """Create the layers that a model file describes.

    Raises ValueError if a type is neither a layer class of mpidl nor in `layer_types`, or if a
    custom class has the name of a layer class of mpidl.
    """
    public = {name: getattr(layers, name) for name in dir(layers)}
    types = {name: kind for name, kind in public.items() if _is_layer_type(kind)}
    for kind in layer_types:
        if kind.__name__ in types:
            raise ValueError(
                f"a custom layer class needs a name other than mpidl's {kind.__name__}"
            )
        types[kind.__name__] = kind
    result = []
    for spec in specs:
        arguments = dict(spec)
        name = arguments.pop("type", None)
        if name not in types:
            raise ValueError(
                f"unknown layer type {name!r}: expected a layer of mpidl, or a custom layer that "
                "you pass (dl.load_model(path, layers=[...]), predict --layers FILE.py)"
            )
        result.append(types[name](**{key: _tuples(value) for key, value in arguments.items()}))
    return result


def _is_layer_type(kind):
    return isinstance(kind, type) and issubclass(kind, Layer)


def _tuples(value):
    """Convert a list, and lists inside it, to tuples; return other values unchanged."""
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def checked_arrays(kind: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the dict `new`.

    Raise ValueError if names, order or shapes differ.
    """
    if list(old) != list(new) or any(old[k].shape != np.shape(new[k]) for k in old):
        raise ValueError(
            f"{kind}: expected {', '.join(f'{k} {v.shape}' for k, v in old.items())}; got "
            f"{', '.join(f'{k} {np.shape(v)}' for k, v in new.items())}"
        )
    return dict(new)


def layer_of(key: str) -> str:
    """Return the layer's name in the key of a learnable, such as "conv1" for "conv1.weight"."""
    return key.rsplit(".", 1)[0]
