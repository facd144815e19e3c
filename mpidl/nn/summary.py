"""Summarize the layers of a network: shapes, learnables, memory and operations."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpidl.core.blocks import LANES, blocks_of
from mpidl.nn.layers import Flatten
from mpidl.text import aligned

if TYPE_CHECKING:
    from mpidl.nn.network import Network

FLOAT = 4  # bytes of a float32


class Row(NamedTuple):
    """Properties of one layer in an `Analysis`.

    Attributes
    ----------
    name, type
        Names of the layer and of its class.
    reads
        Names of the outputs that the layer reads.
    output_shape
        Shape of the output for one image.
    learnables, state
        Number of elements of the layer's learnables and state.
    memory
        Size in bytes of the output for a mini-batch, or 0 if a training step does not store it.
    flops
        Number of floating-point operations of the forward pass for one image. Each multiply-add
        counts as two operations.
    trainable
        False for a frozen layer.
    """

    name: str
    type: str
    reads: tuple[str, ...]
    output_shape: tuple[int, ...]
    learnables: int
    state: int
    memory: int
    flops: int
    trainable: bool


class Analysis:
    """A table of a network's layers. `str(analysis)` formats it as text.

    Parameters
    ----------
    net
        The network.
    batch_size
        Number of images for which the memory of the layers' outputs is computed.

    Attributes
    ----------
    rows
        One `Row` per layer, in the order of the network.
    """

    def __init__(self, net: Network, batch_size: int = 128) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.input_shape, self.batch_size = net.input_shape, batch_size
        images = LANES * blocks_of(batch_size)
        counts = {kind: _by_layer(net.table(kind)) for kind in ("parameters", "state")}
        shapes = dict(zip(net.layer_names, net.output_shapes, strict=True))
        shapes["images"] = net.input_shape
        stored = net.stored_layers()
        self.rows: list[Row] = []
        for layer, reads in zip(net.layers, net.reads, strict=True):
            output = shapes[layer.name]
            # the output of Flatten is a view
            has_memory = layer.name in stored and not isinstance(layer, Flatten)
            self.rows.append(
                Row(
                    layer.name,
                    type(layer).__name__,
                    reads,
                    output,
                    counts["parameters"].get(layer.name, 0),
                    counts["state"].get(layer.name, 0),
                    FLOAT * images * math.prod(output) if has_memory else 0,
                    2 * layer.multiply_adds(shapes[reads[0]], output),
                    layer.trainable,
                )
            )

    @property
    def learnables(self) -> int:
        """Number of learnables, including frozen learnables."""
        return sum(row.learnables for row in self.rows)

    @property
    def state(self) -> int:
        """Number of elements of the state."""
        return sum(row.state for row in self.rows)

    @property
    def memory(self) -> int:
        """Total size in bytes of the outputs that a training step stores for a mini-batch."""
        return sum(row.memory for row in self.rows)

    @property
    def flops(self) -> int:
        """Number of floating-point operations of a forward pass for one image.

        A backward pass needs about twice as many operations.
        """
        return sum(row.flops for row in self.rows)

    def _table(self):
        """Return header, rows and totals as tuples of strings, without empty columns."""
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
        lines.append(("total", "", "", "", f"{totals[0]:,}", _number(totals[1]), *totals[2:]))
        columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
        return list(zip(*columns, strict=True))

    def _footnote(self):
        return (
            f"memory: stored outputs of {self.batch_size} images; MFLOP: forward pass of one image"
        )

    def __str__(self) -> str:
        table = self._table()
        return "\n".join([*aligned(table, left=table[0].index("output")), self._footnote()])

    def __repr__(self) -> str:
        return f"Analysis({len(self.rows)} layers, batch_size={self.batch_size})"

    def _repr_html_(self) -> str:
        head, *lines = self._table()
        rows = [_html_row(head, "th"), *(_html_row(line, "td") for line in lines)]
        return f"<table>{''.join(rows)}</table><p>{html.escape(self._footnote())}</p>"


def _html_row(cells, tag):
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def analyze(net: Network, batch_size: int = 128) -> Analysis:
    """Return an `Analysis` of a network for mini-batches of `batch_size` images.

    Parameters
    ----------
    net : Network
        The network.
    batch_size : int
        Number of images for which the memory of the layers' outputs is computed.

    Returns
    -------
    Analysis
        A table of the layers, which can be printed.
    """
    return Analysis(net, batch_size)


def layer_table(net: Network) -> str:
    """Return a text table of the layers, with their output shapes and numbers of learnables."""
    counts = _by_layer(net.table())
    rows = [("layer", "type", "output", "learnables")]
    rows.append(("images", "", times(net.input_shape), ""))
    for layer, shape in zip(net.layers, net.output_shapes, strict=True):
        number = _number(counts.get(layer.name, 0))
        rows.append((layer.name, type(layer).__name__, times(shape), number))
    return "\n".join([*aligned(rows, left=2), f"{sum(counts.values()):,} learnables"])


def times(shape: Sequence[int]) -> str:
    """Format a shape as text. For example, (3, 32, 32) becomes "3x32x32"."""
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
