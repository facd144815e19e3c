"""Run the layers of a network in order, and release each output after its last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpidl import phases
from mpidl.nn import fusion, graph
from mpidl.nn.layers import Concat, Layer, LayerContext
from mpidl.nn.layers.base import Value


class Run(NamedTuple):
    """One layer, or several layers that are computed as one op."""

    layers: tuple[Layer, ...]
    reads: tuple[str, ...]  # names of the outputs of other runs that this run reads
    released: list[str]  # names of the outputs that no later run reads
    name: str  # names of the layers, joined by "+"

    @property
    def stored(self) -> str:
        """Name of the layer whose output a training step stores; a joined input is not stored."""
        joins = len(self.layers) > 1 and isinstance(self.layers[0], Concat)
        return str(self.layers[1 if joins else 0].name)


class Plan:
    """The runs of a network's layers, for each set of fused ops that a backend may have."""

    def __init__(self, layers: Sequence[Layer], reads: Sequence[tuple[str, ...]]) -> None:
        self.runs: dict[fusion.Kinds, list[Run]] = {}
        for kinds in (fusion.RUNS, ()):
            numbers = fusion.find_runs(layers, reads, kinds)
            last_reads = graph.last_readers(reads, numbers)
            self.runs[kinds] = [
                Run(
                    tuple(layers[i] for i in run),
                    fusion.outer_reads([layers[i] for i in run], [reads[i] for i in run]),
                    released,
                    "+".join(layers[i].name for i in run),
                )
                for run, released in zip(numbers, last_reads, strict=True)
            ]

    def output(
        self, name: str, images: Value, fuse: bool, context_of: Callable[[Layer], LayerContext]
    ) -> Any:
        """Compute the output of a layer.

        The name is that of the last layer of a run, or "images". With `fuse`, fused ops are used if
        the backend supports them.
        """
        outputs: dict[str, Any] = {graph.IMAGES: images}
        for run in self.runs[fusion.supported(images) if fuse else ()]:
            if name in outputs:
                break
            contexts = [context_of(layer) for layer in run.layers]
            x: Any = tuple(outputs[read] for read in run.reads)
            with phases.layer(run.name):
                if len(run.layers) > 1:
                    x = fusion.forward(run.layers, x, contexts)
                else:
                    x = x if graph.input_names(run.layers[0]) else x[0]
                    x = run.layers[0].forward(x, contexts[0])
            outputs[run.layers[-1].name] = x
            for read in run.released:
                outputs.pop(read, None)
        return outputs[name]
