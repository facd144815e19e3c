"""Compute predictions in planned memory: no more than the arrays that are needed together.

Arrays that are allocated one by one fragment the memory: those of large images would need half as
much again. Therefore, the function runs once while a `Recorder` takes the kernel calls, and notes
when each array is needed. Nothing is computed in this pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.planned_arena import PlannedArena
from mpidl.backends.cpu.recorder import Recorder
from mpidl.core.blocks import Blocked
from mpidl.nn import Network


class PlannedMemory:
    """The memory in which one function computes the predictions of mini-batches on a CPU."""

    def __init__(self) -> None:
        self.memory = PlannedArena()
        self.plans: dict[int, list[Any]] = {}  # places for each number of blocks on this rank

    def call(
        self, function: Callable[[Network, Blocked], Any], net: Network, images: Blocked
    ) -> Any:
        """Return function(net, images), computed in this memory."""
        blocks = images.batch.blocks
        if blocks not in self.plans:
            self.plans[blocks] = self._plan(function, net, images)
        self.memory.follow(self.plans[blocks])
        with arenas.through(self.memory):
            return function(net, images)

    def _plan(self, function, net, images):
        """Return places for the arrays of the function; [] if it fails without results."""
        recorder = Recorder([], self.memory)
        recorder.input("images", images.raw)
        with contextlib.suppress(Exception):  # Python code may fail, because nothing is computed
            with recorder.recording():
                function(net, images)
            return recorder.plan()
        return []


def memory_for(net: Network) -> PlannedMemory | None:
    """Return memory for a network; None if it is on a GPU, or if some layers are not mpidl's.

    Custom layers may have effects that must not happen twice.
    """
    is_ours = all(type(layer).__module__.startswith("mpidl.") for layer in net.layers)
    return PlannedMemory() if is_ours and not net.on_device and builds.kernels() else None
