"""Tables of weights for resampling: which source pixels each output pixel adds up, along one axis.

A table is a sparse matrix. The gradient of a resampling is the resampling by the transposed tables.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

TAP = np.dtype([("pixel", np.int32), ("weight", np.float32)])  # as in kernels/cpu/resample.c


@dataclass(frozen=True, eq=False)
class Taps:
    """The weights along one axis.

    Attributes
    ----------
    pixels : int
        Number of source pixels.
    outputs : sequence of sequence of (int, float)
        For each output pixel, its source pixels in the order in which they are added, and their
        weights.
    """

    pixels: int
    outputs: Sequence[Sequence[tuple[int, float]]]

    @functools.cached_property
    def transposed(self) -> Taps:
        """The table of the gradient."""
        columns: list[list[tuple[int, float]]] = [[] for _ in range(self.pixels)]
        for output, taps in enumerate(self.outputs):
            for pixel, weight in taps:
                columns[pixel].append((output, weight))
        return Taps(len(self.outputs), columns)

    @functools.cached_property
    def packed(self) -> np.ndarray:
        """The table for the kernels, int64: where the taps of each output begin, and the taps."""
        starts = np.cumsum([0, *map(len, self.outputs)])
        taps = np.array([tap for taps in self.outputs for tap in taps], TAP)
        return np.concatenate([starts.astype(np.int64), taps.view(np.int64)])

    def places(self) -> Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (outputs, source pixels, weights) of the first taps, of the second taps, ..."""
        for n in range(max(map(len, self.outputs), default=0)):
            taps = [(i, *taps[n]) for i, taps in enumerate(self.outputs) if len(taps) > n]
            outputs, pixels, weights = zip(*taps, strict=True)
            yield np.array(outputs), np.array(pixels), np.array(weights)
