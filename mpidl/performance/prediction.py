"""Predict training speed by number of ranks, and the number of ranks at which scaling stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpidl.comm.simulation import Link
from mpidl.core.blocks import blocks_of
from mpidl.performance.model import Model, Setting, most_blocks

HALF = 0.5  # scaling stops if the efficiency would fall below this value
GAIN = 1.02  # scaling stops if twice as many ranks would give a smaller speed-up than this
MOST_RANKS = 1024
MOST_TRIED = 256  # maximum number of ranks for which other options are tried
# Half-width of the central 90 % of a normal distribution, in standard deviations.
NINETY_PERCENT = 1.645


def predict(
    record: Mapping[str, Any],
    counts: Sequence[int],
    link: Link | None = None,
    ranks_per_node: int | None = None,
    show: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Predict training speed on several numbers of ranks.

    "rows" has a dict for each number of ranks, with images per second, the seconds of a step and of
    its parts, efficiency and relative errors. "stop" is the result of `find_stop`. "fit" has the
    fitted costs. "link" and "ranks_per_node" are the assumptions, by default as measured. `show`
    receives a line of progress before each computation of a speed.
    """
    model = Model(record, link)
    setting = model.setting
    if ranks_per_node is not None:
        setting = replace(setting, ranks_per_node=ranks_per_node)
    error = Error(model)
    rates = Rates(model, show)
    rows = []
    for ranks in counts:
        speed = rates.speed(ranks, setting)
        step = model.step(ranks, setting)
        speed_error, efficiency_error = error.relative(ranks, setting)
        rows.append(
            {
                "ranks": ranks,
                "images_per_second": speed,
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
        "stop": find_stop(rates, setting, max([*counts, MOST_TRIED])),
        "fit": _fit(model),
        "link": None if link is None else list(link),
        "ranks_per_node": setting.ranks_per_node,
    }


class Error:
    """Estimates the error of a model's predictions from resampled models.

    Exchanges are not simulated again for each resampled model. Instead, their simulated times are
    scaled by the measured times of the resampled rounds.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.models = model, model.resampled()
        total = sum(model.exchanges.fold_seconds.values())
        self.factors = [sum(m.exchanges.fold_seconds.values()) / total for m in self.models]
        self.couplings = [1.0] * len(self.models)
        if model.coupled_seconds is not None:
            parts = self._seconds(model.record["ranks"], model.setting)
            self.couplings = [
                m.coupled_seconds / s for m, s in zip(self.models, parts, strict=True)
            ]

    def relative(self, ranks: int, setting: Setting) -> tuple[float, float]:
        """Return the relative errors of speed and efficiency: half-widths of 90 % intervals.

        On one rank, the error of the efficiency is 0, because the efficiency is 1 by definition.
        """
        model = self.model
        parts = model.parts(ranks, setting)
        systematic = NINETY_PERCENT * np.hypot(
            model.fit_error, model.exchanges.fold_error * parts.sum / parts.seconds
        )
        if ranks > model.record["ranks"]:  # the coupling may grow with the number of ranks
            systematic = np.hypot(systematic, model.coupling - 1)
        factors = [model.together(ranks, coupling) for coupling in self.couplings]
        times = np.multiply(factors, self._seconds(ranks, setting))
        speed, efficiency = (
            float(np.hypot(_half_width(values), systematic))
            for values in (times, times / self._seconds(1, setting))
        )
        return speed, 0.0 if ranks == 1 else efficiency

    def _seconds(self, ranks, setting):
        """Return the duration of a step in seconds for each resampled model, without coupling."""
        blocks, peers = most_blocks(blocks_of(setting.images(ranks)), ranks)
        sums = self.model.parts(ranks, setting).sum
        return [
            max(m.compute_seconds(blocks, ranks, setting, peers)) + factor * sums
            for m, factor in zip(self.models, self.factors, strict=True)
        ]


def _half_width(values):
    """Return half the width of the central 90 % of the values, relative to the median."""
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return (high - low) / 2 / middle


class Rates:
    """Predicted speeds in images per second. Each speed is computed only once."""

    def __init__(self, model: Model, show: Callable[[str], object] = lambda line: None) -> None:
        self.model, self.show = model, show
        self._table: dict[tuple[int, Setting], float] = {}

    def speed(self, ranks: int, setting: Setting) -> float:
        """Return the predicted images per second."""
        key = (ranks, setting)
        if key not in self._table:
            self.show(f"{ranks} ranks")
            self._table[key] = self.model.images_per_second(ranks, setting)
        return self._table[key]

    def efficiency(self, ranks: int, setting: Setting) -> float:
        """Return the predicted efficiency relative to one rank."""
        return self.speed(ranks, setting) / ranks / self.speed(1, setting)


def find_stop(rates: Rates, setting: Setting, limit: int) -> dict[str, Any]:
    """Find the number of ranks at which scaling stops, and the options that raise this number.

    Scaling stops at N ranks if 2N ranks are less than 2 % faster than N ranks, or less than half as
    efficient as one rank. N is the smallest power of two for which this is the case. In the result,
    "ranks" is N, or None if scaling does not stop up to `limit`. "reason" is the part of a step
    that loses the most time with more ranks. "options" is {option: ranks} for the options that
    raise N; None means that scaling does not stop up to MOST_TRIED ranks.
    """
    model = rates.model
    ranks = _stop(rates, setting, limit)
    if ranks is None:
        return {"ranks": None, "limit": limit, "reason": None, "options": {}}
    step = model.step(2 * ranks, setting)
    share = step.input / step.seconds
    options: dict[str, int | None] = {}
    for name, variant in _variants(setting, share).items():
        moved = _stop(rates, variant, MOST_TRIED)
        if moved is None or moved > ranks:
            options[name] = moved
    return {
        "ranks": ranks,
        "limit": limit,
        "reason": _reason(model, ranks, setting),
        "options": options,
    }


def _variants(setting, input_share):
    """Return {option: setting} for the options that may raise the number where scaling stops."""
    changed: dict[str, Setting] = {}
    if setting.batch_per_rank is None:
        for factor in (2, 4):
            size = factor * setting.batch_size
            changed[f"--batch-size {size}"] = replace(setting, batch_size=size)
    else:
        size = 2 * setting.batch_per_rank
        changed[f"--batch-per-rank {size}"] = replace(setting, batch_per_rank=size)
    if setting.ranks_per_node > 1:
        threads, ranks = 2 * setting.threads, max(1, setting.ranks_per_node // 2)
        changed[f"--threads {threads}"] = replace(setting, threads=threads, ranks_per_node=ranks)
    if input_share > 0.1:
        workers = 2 * setting.workers
        changed[f"--workers {workers}"] = replace(setting, workers=workers)
    return changed


def _stop(rates, setting, limit):
    ranks = 1
    while 2 * ranks <= limit:
        is_faster = rates.speed(2 * ranks, setting) >= GAIN * rates.speed(ranks, setting)
        if not is_faster or rates.efficiency(2 * ranks, setting) < HALF:
            return ranks
        ranks *= 2
    return None


def _reason(model, ranks, setting):
    """Return a name for the part of a step that loses the most time on twice as many ranks."""
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
    """Return the fitted costs as a dict, for the report."""
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
        "coupling": model.coupling,
        "fold_error": model.exchanges.fold_error,
        "reading_seconds_per_block": model.record["reading_seconds_per_block"],
    }


def default_counts() -> list[int]:
    """Return the default numbers of ranks: 1, 2, 4, ..., MOST_RANKS."""
    return [1 << k for k in range(MOST_RANKS.bit_length())]
