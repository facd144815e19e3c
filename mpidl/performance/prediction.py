"""Predict a training on many numbers of ranks, and where adding ranks stops to help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpidl.blocks import blocks_of
from mpidl.performance.model import Error, Model, Setting, variants
from mpidl.performance.simulation import Link
from mpidl.performance.trace import SUM

HALF = 0.5  # efficiency below which scaling has stopped
GAIN = 1.02  # factor by which twice the ranks must be faster
MOST_RANKS = 1024
MOST_TRIED = 256  # ranks for which other options are tried


def predict(
    record: Mapping[str, Any],
    counts: Sequence[int],
    link: Link | None = None,
    ranks_per_node: int | None = None,
) -> dict[str, Any]:
    """Predict the speed of a training.

    Parameters
    ----------
    record : mapping
        The result of `probe.measure`.
    counts : sequence of int
        Numbers of ranks.
    link : Link, optional
        Assumed link between nodes; by default the measured one.
    ranks_per_node : int, optional
        Ranks that share a node; by default as many as in the probe.

    Returns
    -------
    dict
        "rows": a dict per number of ranks, with images per second, step in seconds and its parts,
        efficiency and relative error; "stop": see `find_stop`; "fit": the fitted costs.
    """
    model = Model(record, link)
    setting = model.setting
    if ranks_per_node is not None:
        setting = replace(setting, ranks_per_node=ranks_per_node)
    error = Error(model)
    rates = _Rates(model)
    rows = []
    for ranks in counts:
        step = model.step(ranks, setting)
        speed_error, efficiency_error = error.relative(ranks, setting)
        rows.append(
            {
                "ranks": ranks,
                "images_per_second": rates.speed(ranks, setting),
                "error": speed_error,
                "efficiency_error": efficiency_error,
                "efficiency": rates.efficiency(ranks, setting),
                "step_seconds": step.seconds,
                "epoch_seconds": model.epoch_seconds(ranks, setting),
                "compute": step.compute,
                "wait": step.wait,
                "sum": step.sum,
                "input": step.input,
            }
        )
    return {
        "rows": rows,
        "stop": find_stop(model, setting, max([*counts, MOST_TRIED])),
        "fit": _fit(model),
        "link": None if link is None else list(link),
        "ranks_per_node": setting.ranks_per_node,
    }


class _Rates:
    """Predicted images per second, each computed once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._table: dict[tuple[int, Setting], float] = {}

    def speed(self, ranks: int, setting: Setting) -> float:
        key = (ranks, setting)
        if key not in self._table:
            self._table[key] = self.model.images_per_second(ranks, setting)
        return self._table[key]

    def efficiency(self, ranks: int, setting: Setting) -> float:
        return self.speed(ranks, setting) / ranks / self.speed(1, setting)


def find_stop(model: Model, setting: Setting, limit: int) -> dict[str, Any]:
    """Find the number of ranks at which scaling stops, and the options that would move it.

    Scaling stops at N, the smallest power of two for which 2N ranks are less than 2 % faster than
    N, or less than half as efficient as one rank.

    Returns
    -------
    dict
        "ranks": the number of ranks, or None if scaling does not stop up to `limit`; "reason": the
        part of a step that grows most beyond; "options": {option: ranks} of options that move the
        point, where None means that scaling does not stop up to MOST_TRIED ranks.
    """
    rates = _Rates(model)
    ranks = _stop(rates, setting, limit)
    if ranks is None:
        return {"ranks": None, "limit": limit, "reason": None, "options": {}}
    step = model.step(2 * ranks, setting)
    share = step.input / step.seconds
    has_sums = any(event.kind == SUM for event in model.events[:-1]) and (
        model.record["batchnorm"] == "global"
    )
    options: dict[str, int | None] = {}
    for name, variant in variants(setting, has_sums, share).items():
        moved = _stop(rates, variant, MOST_TRIED)
        if moved is None or moved > ranks:
            options[name] = moved
    return {
        "ranks": ranks,
        "limit": limit,
        "reason": _reason(model, ranks, setting),
        "options": options,
    }


def _stop(rates, setting, limit):
    ranks = 1
    while 2 * ranks <= limit:
        is_faster = rates.speed(2 * ranks, setting) >= GAIN * rates.speed(ranks, setting)
        if not is_faster or rates.efficiency(2 * ranks, setting) < HALF:
            return ranks
        ranks *= 2
    return None


def _reason(model, ranks, setting):
    """Return the part of a step that is lost most with twice the ranks, in words."""
    one_rank, step = model.step(1, setting), model.step(2 * ranks, setting)
    scale = setting.images(2 * ranks) / setting.images(1) / (2 * ranks)
    if blocks_of(setting.images(2 * ranks)) < 2 * ranks:
        return "ranks without blocks of 16 images"
    losses = {
        "waiting for the slowest rank": step.wait,
        "the exchange of sums": step.sum,
        "the cost of a step that does not depend on its images": step.compute
        - one_rank.compute * scale,
        "reading images": step.input - one_rank.input * scale,
    }
    return max(losses, key=lambda name: losses[name])


def _fit(model):
    """Return the fitted costs for the report."""
    network = model.exchanges.network
    return {
        "per_step_seconds": {str(active): model.fit(active)[0] for active in model.levels},
        "per_block_seconds": {str(active): model.fit(active)[1] for active in model.levels},
        "fit_error": model.fit_error,
        "alpha_seconds": {
            k: 2 * o + link.latency for k, (o, link) in model.exchanges.links.items()
        },
        "beta_seconds_per_byte": {
            k: link.per_byte for k, (_, link) in model.exchanges.links.items()
        },
        "overhead_seconds": network.overhead,
        "per_exchange_seconds": network.per_exchange,
        "per_combined_byte_seconds": network.per_combined_byte,
        "hidden": model.exchanges.hidden,
        "fold_error": model.exchanges.fold_error,
        "reading_seconds_per_block": model.record["reading_seconds_per_block"],
    }


def default_counts() -> list[int]:
    """Return 1, 2, 4, ..., MOST_RANKS."""
    return [1 << k for k in range(MOST_RANKS.bit_length())]
