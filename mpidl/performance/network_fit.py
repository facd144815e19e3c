"""Fit the costs of messages and exchanges to the record of a probe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from mpidl.comm import simulation
from mpidl.comm.simulation import Link, Network
from mpidl.core import fold
from mpidl.core.blocks import blocks_of
from mpidl.performance.links import COMBINES
from mpidl.performance.trace import AGREE, Event

SMALL_BYTES = 16 * 1024  # messages and exchanges up to this size are small


class NetworkFit:
    """The costs of messages and exchanges, fitted to the measurements of a probe.

    `sample` has the indices of the probe's rounds to use, possibly with repetitions.
    """

    def __init__(self, record: Mapping[str, Any], sample: Sequence[int]) -> None:
        self.record = record
        self._records = [record["network"][number] for number in sample]

    @cached_property
    def fold_seconds(self) -> dict[Event, float]:
        """Median measured duration in seconds of each exchange, on the ranks of the probe."""
        times: dict[Event, list[float]] = {}
        for record in self._records:
            for event, seconds in record["folds"]:
                times.setdefault(Event(*event), []).append(seconds)
        return {event: float(np.median(values)) for event, values in times.items()}

    @cached_property
    def hidden(self) -> float:
        """Fraction of the exchange of gradients that overlaps with the backward pass."""
        return float(np.median([record["hidden"] for record in self._records]))

    @cached_property
    def links(self) -> dict[str, tuple[float, Link]]:
        """{"inside" or "between": (overhead of a message in seconds, Link)}, as measured."""
        measured = {}
        for kind in ("inside", "between"):
            records = [record[kind] for record in self._records if kind in record]
            if not records:
                continue
            times = np.median([record["ping_pong"] for record in records], axis=0)
            sizes = np.array(records[0]["sizes"])
            overhead = float(np.median([record["burst"] for record in records])) / 2
            overhead = min(overhead, float(times[0]) / 2)
            large = sizes >= SMALL_BYTES
            growth = (times[large] - times[0]) / (sizes[large] - sizes[0])
            per_byte = max(float(np.median(growth)), 0.0)
            latency = float(times[0]) - 2 * overhead - per_byte * int(sizes[0])
            measured[kind] = overhead, Link(max(latency, 0.0), per_byte)
        return measured

    @cached_property
    def network(self) -> Network:
        """The Network of the probe. Costs of exchanges and of combining nodes are fitted."""
        measured = self.links
        overhead, inside = measured.get("inside", measured.get("between", (0.0, Link(0, 0))))
        between = measured["between"][1] if "between" in measured else inside
        size = -(-self.record["ranks"] // self.record["hosts"])
        shares_memory = self.record["shares_memory"]
        network = Network(
            overhead, inside, between, ranks_per_node=size, shares_memory=shares_memory
        )
        folds = [e for e in self.fold_seconds if e.kind != AGREE and e.operation != "gather"]
        small = [e for e in folds if e.width * e.itemsize <= SMALL_BYTES]
        if small:
            gaps = [self.fold_seconds[e] - self._probe_seconds(e, network) for e in small]
            network = network._replace(per_exchange=max(0.0, float(np.median(gaps))))
        large = max(folds, key=lambda e: e.width * e.itemsize, default=None)
        if large is None or large in small:
            return network
        gap = self.fold_seconds[large] - self._probe_seconds(large, network)
        if gap > 0:
            unit = network._replace(per_combined_byte=1e-9)
            slope = self._probe_seconds(large, unit) - self._probe_seconds(large, network)
            return network._replace(per_combined_byte=1e-9 * gap / slope) if slope > 0 else network
        # The simulated exchange is too slow, because messages in both directions overlap.
        free = _with_speed(network, 0.0)
        floor, simulated = (self._probe_seconds(large, n) for n in (free, network))
        if simulated <= floor:
            return network
        factor = (self.fold_seconds[large] - floor) / (simulated - floor)
        return _with_speed(network, min(max(factor, 0.1), 1.0))

    def _probe_seconds(self, event, network):
        ranks, leaves = self._probe_layout
        return self.simulated(event, ranks, leaves, network)

    @property
    def _probe_layout(self):
        """(ranks, blocks of the mini-batch) for which the probe measured exchanges."""
        ranks = self.record["ranks"]
        return ranks, max(blocks_of(self.record["batch_size"]), ranks)

    @property
    def fold_error(self) -> float:
        """Root mean square of the relative differences between simulated and measured exchanges."""
        errors = [
            self._probe_seconds(event, self.network) / seconds - 1
            for event, seconds in self.fold_seconds.items()
            if event.kind != AGREE
        ]
        return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0

    def seconds(self, event: Event, ranks: int, leaves: int, network: Network) -> float:
        """Return the duration of an exchange in seconds, measured if possible.

        If the probe did not measure this exchange, the duration is simulated.
        """
        if event in self.fold_seconds and (ranks, leaves) == self._probe_layout:
            if network == self.network:
                return self.fold_seconds[event]
        return self.simulated(event, ranks, leaves, network)

    def simulated(self, event: Event, ranks: int, leaves: int, network: Network) -> float:
        """Return the simulated duration of an exchange in seconds if all ranks start together."""
        if event.kind == AGREE:  # MPI's reduction, whose duration is proportional to its rounds
            measured = self.fold_seconds.get(event, 0.0)
            rounds = math.ceil(math.log2(ranks)) / max(math.log2(self.record["ranks"]), 1)
            return measured * rounds
        if event.operation == "gather":
            nbytes = event.width * event.itemsize
            return simulation.allgather_seconds(ranks, nbytes, network)
        return simulation.exchange_seconds(
            fold.split_blocks(leaves, ranks),
            event.width,
            event.itemsize,
            network,
            COMBINES[event.operation],
        )


def _with_speed(network, factor):
    """Return the network with the seconds per byte of both links multiplied by a factor."""
    inside, between = (
        link._replace(per_byte=factor * link.per_byte) for link in (network.inside, network.between)
    )
    return network._replace(inside=inside, between=between)
