"""Who reads whose output: a list of layers as a graph.

The list is an order in which the layers can be computed: each reads layers before it.
"""

import copy

from mpidl.text import did_you_mean

IMAGES = "images"  # what the network's own input is called


def edges(layers):
    """Of each named layer, a tuple of the names it reads.

    The layer before it, or the images for the first, where it does not say. Raises ValueError for
    a name that is unknown or comes later, and for an output that nobody reads.
    """
    names = [layer.name for layer in layers]
    found = []
    for i, layer in enumerate(layers):
        several = several_of(layer)
        if several is None:
            before = names[i - 1] if i else IMAGES
            reads = (before if layer.after is None else layer.after,)
        else:
            reads = several
            if layer.after is not None:
                raise ValueError(f"{layer.name}: inputs say what it reads, so after is not for it")
        for name in reads:
            _check(layer.name, name, names[:i], names)
        found.append(reads)
    read = {name for reads in found for name in reads}
    for name in names[:-1]:
        if name not in read:
            raise ValueError(
                f"{name}: no layer reads its output, and it is not the last layer, whose output is "
                "the network's"
            )
    return found


def several_of(layer):
    """The names that a layer of several inputs reads; None for a layer of one input."""
    inputs = getattr(layer, "inputs", None)
    if inputs is None:
        return None
    if not isinstance(inputs, list | tuple) or len(inputs) < 2:
        raise ValueError(f"{layer.name}: expected the names of two inputs or more, got {inputs!r}")
    return tuple(inputs)


def with_names(layer, renamed):
    """A copy of a layer that reads the new names, {old: new}."""
    layer = copy.copy(layer)
    layer.after = renamed.get(layer.after, layer.after)
    several = several_of(layer)
    if several is not None:
        layer.inputs = tuple(renamed.get(name, name) for name in several)
    return layer


def _check(reader, name, before, names):
    if name == IMAGES or name in before:
        return
    if name == reader:
        raise ValueError(f"{reader}: it cannot read its own output")
    if name in names:
        raise ValueError(f"{reader}: reads {name}, which comes later in the list of layers")
    hint = did_you_mean(name, [IMAGES, *before])
    raise ValueError(f"{reader}: reads {name!r}, and no layer has that name{hint}")


def last_readers(reads, runs):
    """Of each run of layers (a list of numbers of layers), the names that nobody reads later."""
    last = {}
    for at, run in enumerate(runs):
        for i in run:
            for name in reads[i]:
                last[name] = at
    return [[name for name, end in last.items() if end == at] for at in range(len(runs))]
