"""What a network's layers come to: shapes, learnables, memory, operations."""

import math
from typing import NamedTuple

from mpidl.blocks import LANES, blocks_of
from mpidl.nn.layers import Flatten
from mpidl.text import aligned

FLOAT = 4  # bytes


class Row(NamedTuple):
    """A layer of a network.

    reads: the names of what it reads; learnables, state: how many numbers; memory: bytes of its
    output for a mini-batch, 0 where it is not stored; flops: operations of forward for one image,
    two for each product that is added up.
    """

    name: str
    type: str
    reads: tuple
    output_shape: tuple
    learnables: int
    state: int
    memory: int
    flops: int
    trainable: bool


class Analysis:
    """A table of a network's layers: `rows` in their order, totals, as text `str(analysis)`."""

    def __init__(self, net, batch_size=128):
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.input_shape, self.batch_size = net.input_shape, batch_size
        images = LANES * blocks_of(batch_size)
        counts = {kind: _by_layer(net.table(kind)) for kind in ("parameters", "state")}
        shapes = dict(zip(net.layer_names, net.output_shapes, strict=True))
        shapes["images"] = net.input_shape
        stored = net.stored()
        self.rows = []
        for layer, reads in zip(net.layers, net.reads, strict=True):
            output = shapes[layer.name]
            kept = layer.name in stored and not isinstance(layer, Flatten)  # which moves nothing
            self.rows.append(
                Row(
                    layer.name,
                    type(layer).__name__,
                    reads,
                    output,
                    counts["parameters"].get(layer.name, 0),
                    counts["state"].get(layer.name, 0),
                    FLOAT * images * math.prod(output) if kept else 0,
                    2 * layer.multiply_adds(shapes[reads[0]], output),
                    layer.trainable,
                )
            )

    @property
    def learnables(self):
        """How many numbers are learnables, frozen ones included."""
        return sum(row.learnables for row in self.rows)

    @property
    def state(self):
        """How many numbers the layers keep beside their learnables."""
        return sum(row.state for row in self.rows)

    @property
    def memory(self):
        """Bytes of all outputs that a training step stores for a mini-batch."""
        return sum(row.memory for row in self.rows)

    @property
    def flops(self):
        """Operations of forward for one image; backward takes about twice as many."""
        return sum(row.flops for row in self.rows)

    def __str__(self):
        head = ("layer", "type", "reads", "output", "learnables", "state", "memory", "MFLOP")
        lines = [head, ("images", "", "", times(self.input_shape), "", "", "", "")]
        before = "images"
        for row in self.rows:
            lines.append(
                (
                    row.name,
                    row.type + ("" if row.trainable else " (frozen)"),
                    "" if row.reads == (before,) else ", ".join(row.reads),
                    times(row.output_shape),
                    _number(row.learnables),
                    _number(row.state),
                    _size(row.memory) if row.memory else "",
                    f"{row.flops / 1e6:,.2f}" if row.flops else "",
                )
            )
            before = row.name
        totals = self.learnables, self.state, _size(self.memory), f"{self.flops / 1e6:,.2f}"
        lines.append(("total", "", "", "", f"{totals[0]:,}", f"{totals[1]:,}", *totals[2:]))
        below = (
            f"memory: of outputs that are stored, {self.batch_size} images; MFLOP: million "
            "operations of forward, one image"
        )
        return "\n".join([*aligned(lines, left=3), below])


def analyze(net, batch_size=128):
    """The `Analysis` of a network for mini-batches of so many images."""
    return Analysis(net, batch_size)


def times(shape):
    """(3, 32, 32) as 3x32x32."""
    return "x".join(map(str, shape))


def _by_layer(table):
    counts = {}
    for layer, _, _, count in table:
        counts[layer] = counts.get(layer, 0) + count
    return counts


def _number(n):
    return f"{n:,}" if n else ""


def _size(n):
    return f"{n / 2**20:,.1f} MiB" if n >= 2**20 else f"{n / 2**10:,.1f} KiB"
