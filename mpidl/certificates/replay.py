"""Replay parts of a certified run, and compare them with the links of its certificate.

A replay trains like the run, from the initial network or from a checkpoint whose tables have the
digests of a state. A hook compares the states, losses and validations with the certificate, and
ends the replay. Nothing is trusted that a digest does not cover.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidl import numerics
from mpidl.certificates import settings
from mpidl.certificates.certificate import Certificate
from mpidl.certificates.chain import START, Link
from mpidl.certificates.comparison import COMPLETE, REACHED, Comparison, Difference, Unreachable
from mpidl.certificates.covered import Point, load_covered
from mpidl.errors import NotFinite, UserError
from mpidl.evaluation.validation import held_out
from mpidl.files import on_rank_0
from mpidl.ranks.failure import Signals
from mpidl.report import Console
from mpidl.text import printable
from mpidl.training import input_pipeline
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.files.resume_changes import resumable
from mpidl.training.optimizers.checks import optimizer_spec
from mpidl.training.session import Session

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network
    from mpidl.ranks.world import World
    from mpidl.training.options.training_options import TrainingOptions

# Options that do not change the weights. A replay has the auditor's values, or these.
NEUTRAL: dict[str, Any] = {
    "compare_ranks_every": 0,
    "certify": "none",
    "certify_key": None,
    "checkpoint_keep": 0,
    "on_lost_rank": "stop",
    "plots": "none",
    "tensorboard": "off",
    "timeline": 0,
    "track": None,
    "verbose": "off",
    "verbose_every": 0,
    "worker_load": None,
    **{name: None for name in ("device", "gpus", "graphs", "threads", "workers", "prefetch")},
    **{name: None for name in ("cache_mb", "timeout", "timeline_mb")},
}
# A resumed run may train longer. All parts of a replay have the last value, because a longer run
# passes through the states of a shorter one.
LENGTH = ("epochs", "max_iterations", "validation_patience")


class Material(NamedTuple):
    """What an audit trains.

    Attributes
    ----------
    train : Datastore
        The training images.
    network : callable
        Function that returns a new network with the weights that the run began with.
    replaced : dict
        Values of options that replace the texts of the certificate: those in `NEUTRAL`, functions,
        and `validation`, the validation images.
    optimizer : callable
        Function that returns a new optimizer, or None if the options describe it.
    """

    train: Datastore
    network: Callable[[], Network]
    replaced: dict[str, Any]
    optimizer: Callable[[], Any]


def options_of(
    certificate: Certificate, start: Link, replaced: Mapping[str, Any]
) -> TrainingOptions:
    """Return the options of a replay from a start on; see `Material` for `replaced`."""
    last = certificate.of_kind(START)[-1]["options"]
    texts = {**start["options"], **{name: last[name] for name in LENGTH if name in last}}
    values = {name: value for name, value in NEUTRAL.items() if value is not None}
    dropped = {name for name in NEUTRAL if name not in values}
    texts = {name: text for name, text in texts.items() if name not in dropped}
    options = settings.options_from(texts, **{**values, **replaced})
    end = certificate.end["iteration"]
    limits = [s["options"].get("max_iterations", "none") for s in certificate.of_kind(START)]
    if any((settings.value_of("max_iterations", text) or end) >= end for text in limits):
        # A run that is resumed with a limit that it has passed already ends at once.
        limit = options.max_iterations
        options = replace(options, max_iterations=limit and max(limit, end))
    return options


def parts_of(certificate: Certificate, first: int, last: int) -> list[tuple[Link, int]]:
    """Return (start, last iteration) of the parts of a replay that have the same options.

    The last part may be empty: a run that was resumed at its end has finished its network again.
    """
    # Of several starts at one iteration, only the last one has trained.
    starts = {start["iteration"]: start for start in certificate.of_kind(START)}
    current = starts[max(n for n in starts if n <= first)]
    parts = []
    for iteration, start in starts.items():
        is_end = iteration == last == certificate.end["iteration"]
        if not (first < iteration < last or is_end):
            continue
        if _effective(start) != _effective(current):
            parts.append((current, iteration))
        current = start
    return [*parts, (current, last)]


def _effective(start):
    """Return the texts of the options that change the weights."""
    ignored = {*NEUTRAL, *LENGTH, "certify_every"}
    return {name: text for name, text in start["options"].items() if name not in ignored}


SILENT = Console(1)  # that of a rank that prints nothing


class Replay:
    """A replay of consecutive segments. Collective.

    Parameters
    ----------
    world : World
        The ranks of the auditor.
    certificate : Certificate
        The certificate.
    material : Material
        What to train.
    signals : Signals
        Requests to stop the audit.
    """

    def __init__(
        self, world: World, certificate: Certificate, material: Material, signals: Signals
    ) -> None:
        self.world, self.certificate, self.material = world, certificate, material
        self.signals = signals
        self.net: Network | None = None  # the network of the last replay
        self.stopped: str | None = None  # the signal that has stopped a replay

    def run(self, point: Point, comparison: Comparison) -> Difference | None:
        """Replay from a point to the last of the comparison's stops; return a difference, if any.

        Raises
        ------
        UserError
            If the checkpoint is damaged or is not that of the certificate.
        """
        resume, last = self._resume_of(point), comparison.stops[-1]
        comparison.compared = point.iteration
        parts = parts_of(self.certificate, point.iteration, last)
        for i, (start, part_end) in enumerate(parts, 1):
            comparison.begin(part_end, is_last=i == len(parts))
            try:
                self._train(start, resume, comparison)
            except (NotFinite, Unreachable) as error:
                text = getattr(error, "description", str(error))  # without advice
                comparison.differ(point.iteration, text)
                break
            if comparison.handover is None or self.stopped is not None:
                break
            resume = comparison.handover
        return self.world.broadcast(comparison.difference)

    def _resume_of(self, point):
        """Return the arrays and facts of the checkpoint of a point, or None."""
        if point.path is None:
            return None
        loaded = on_rank_0(self.world, lambda: load_covered(str(point.path), self.certificate))
        if loaded is None:
            raise UserError(f"{printable(point.path)}: the file has changed since the audit began")
        return loaded.arrays, loaded.covered

    def _train(self, start, resume, comparison):
        world, material = self.world, self.material
        options = options_of(self.certificate, start, material.replaced)
        images, options = held_out(material.train, options)
        net, optimizer = material.network(), material.optimizer()
        if resume is not None:
            resume = _with_facts(resume, options, net, images, world, optimizer)
        with FolderLock(world) as lock:
            session = Session(world, lock, None, resume)
            session.use_options(options, SILENT)
            with session.active((), self.signals):
                try:
                    input_pipeline.check(net, images, options)
                    result = session.train(net, images, options, [comparison], optimizer=optimizer)
                except UserError as error:  # such as arrays that the network does not have
                    raise Unreachable(str(error)) from None
        self.net = net
        if result.stopped not in (*COMPLETE, REACHED):
            self.stopped = result.stopped
        elif self.signals.name == REACHED:  # otherwise this rank may have received a signal
            self.signals.name = None
        self.signals.agreed = False


def _with_facts(resume, options, net, images, world, optimizer):
    """Add the facts of this replay, which a resumed run compares with those of its checkpoint."""
    arrays, facts = resume
    now = resumable(options, net, images, world.size)
    spec = None if optimizer is None else optimizer_spec(optimizer)
    validation = {**facts["validation"], **now["validation"]}
    rest = {**now, "validation": validation, "optimizer": spec, **numerics.current()}
    # JSON turns tuples into lists, as in a checkpoint.
    return arrays, {**facts, **json.loads(json.dumps({**rest, **input_pipeline.facts(options)}))}
