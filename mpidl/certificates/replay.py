"""Replay parts of a certified run, and compare them with the links of its certificate.

A replay trains like the run, from the initial network or from a checkpoint whose tables have the
digests of a state. A hook compares the states, losses and validations with the certificate, and
ends the replay. Nothing is trusted that a digest does not cover.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidl import numerics
from mpidl.certificates import settings, states
from mpidl.certificates.certificate import Certificate
from mpidl.certificates.chain import START, STATE, VALIDATION, Link
from mpidl.certificates.recording import plain
from mpidl.errors import Fault, NotFinite, UserError
from mpidl.evaluation.validation import BEST, held_out
from mpidl.files import on_rank_0
from mpidl.ranks.failure import Signals
from mpidl.report import Console, metrics
from mpidl.text import printable
from mpidl.training import input_pipeline
from mpidl.training.files import checkpoint, model_file, run_state
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.files.resume_changes import resumable
from mpidl.training.optimizers.checks import optimizer_spec
from mpidl.training.progress import OUTPUT_FUNCTION, PATIENCE, EpochSummary, Position
from mpidl.training.rollback import PREFIX
from mpidl.training.session import Session

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network
    from mpidl.ranks.world import World
    from mpidl.training.options.training_options import TrainingOptions
    from mpidl.training.steps import StepResult
    from mpidl.training.trainer import Trainer

Arrays = dict[str, dict[str, np.ndarray]]
TABLES = ("learnables", "state", "optimizer")  # that each checkpoint has
COMPLETE = (None, PATIENCE, OUTPUT_FUNCTION)  # reasons for the end of a run with its network
REACHED = "audit"  # the reason for which a replay stops; the network is then not finished
NAME = re.compile(r"[0-9]{8,}\.h5")  # of a checkpoint that a run keeps
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


class Point(NamedTuple):
    """A state from which a replay may start: the initial one (no path) or a checkpoint."""

    iteration: int
    path: str | None = None


class Difference(NamedTuple):
    """What differs from the certificate, and the first iteration in which it does."""

    iteration: int
    text: str


def paths_of(folder: str) -> list[str]:
    """Return the paths of the checkpoints in the folder of a run, and in its checkpoints/."""
    paths = []
    for place in (os.path.join(folder, checkpoint.KEEP_FOLDER), folder):
        names = sorted(os.listdir(place)) if os.path.isdir(place) else []
        paths += [os.path.join(place, name) for name in names if NAME.fullmatch(name)]
    paths += [os.path.join(folder, name) for name in (checkpoint.CURRENT, checkpoint.PREVIOUS)]
    return [path for path in paths if os.path.lexists(path)]


class Checkpoint(NamedTuple):
    """The contents of a checkpoint whose state the certificate has.

    Attributes
    ----------
    arrays : dict
        The arrays by table, all of which have the digests of the state.
    covered : dict
        The facts that follow from the certificate.
    facts : dict
        The facts of the file, which nothing covers.
    """

    arrays: Arrays
    covered: dict[str, Any]
    facts: dict[str, Any]


def load_covered(path: str, certificate: Certificate) -> Checkpoint | None:
    """Load a checkpoint, or return None if the certificate has no state of its iteration.

    A state to which the run may roll back must be one of the certificate too.

    Raises
    ------
    UserError
        If the file is damaged, or if a table is not that of the certificate.
    """
    name = printable(path)
    try:
        arrays, attributes = model_file.read(path)
        facts = checkpoint.facts_of(attributes)
        saved = [(facts, {t: a for t, a in arrays.items() if not t.startswith(PREFIX)})]
        if len(saved[0][1]) < len(arrays):
            earlier = {t.removeprefix(PREFIX): a for t, a in arrays.items() if t.startswith(PREFIX)}
            saved.append((facts["rollback"], earlier))
        positions = [_position_of(facts["position"]) for facts, _ in saved]
        for _, tables in saved:
            if missing := [table for table in TABLES if table not in tables]:
                raise ValueError(f"it has no {', '.join(missing)}")
    except (model_file.Torn, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{name}: expected a checkpoint: {error}") from None
    links = {link["iteration"]: link for link in certificate.of_kind(STATE)}
    if not all(position.iteration in links for position in positions):
        return None
    if positions[0].rollbacks < links[positions[0].iteration]["rollbacks"]:
        return None  # the run rolled back to an earlier state, and reached the iteration again
    differing = _differing(links[positions[0].iteration]["tables"], states.table_digests(arrays))
    covered = []
    for (facts, tables), position in zip(saved, positions, strict=True):
        link = links[position.iteration]
        validations = _validations_before(certificate, position.iteration, facts)
        best = {t: states.table_digest(t, tables[t]) for t in BEST if t in tables}
        problems = _differing(validations[-1]["best"] if validations else {}, best)
        # A rollback sets the number of rollbacks anew. A run may be stopped just after it.
        position = replace(position, rollbacks=link["rollbacks"])
        if covered:
            digests = {t: states.table_digest(t, tables[t]) for t in TABLES}
            problems += _differing({t: link["tables"].get(t) for t in TABLES}, digests)
            problems = [PREFIX + table for table in problems]
        if states.progress_digest(position) != link["progress"]:
            problems.append("progress")
        differing += problems
        seconds, validation = {"seconds": 0.0}, _validation_facts(validations, facts)
        covered.append({"position": asdict(position) | seconds, "validation": validation})
    if differing:
        text = f"{', '.join(differing)} differ from the state of iteration"
        raise UserError(f"{name}: {text} {positions[0].iteration}")
    rollback = {"rollback": covered[1]} if len(covered) > 1 else {}
    return Checkpoint(arrays, covered[0] | rollback, saved[0][0])


def _position_of(values):
    """Return the position in the facts of a checkpoint; raise an error if it is damaged."""
    position = Position(**values)
    for name, value in asdict(position).items():
        is_missing = value is None and name in ("correct", "epoch_loss")
        if type(value) not in (int, float) and not is_missing:
            raise ValueError(f"the {name} of its position is not a number")
    return position


def _differing(expected, computed):
    """Return the names whose digests differ between two dicts."""
    return [name for name in {**expected, **computed} if expected.get(name) != computed.get(name)]


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


class Unreachable(Fault):
    """Raised if a training with these options cannot have a state of the certificate."""


def _intervals(start):
    """Return the numbers of iterations between the states that a job records."""
    names = ("certify_every", "checkpoint_keep")
    options = start["options"]
    return [settings.value_of(name, options[name]) for name in names if name in options]


class Comparison:
    """The hook that compares a replay with a certificate, on rank 0, and ends the replay.

    Parameters
    ----------
    certificate : Certificate
        The certificate.
    stops : sequence of int
        Iterations of states, in order. The replay ends with the last one.
    passed : callable
        Function that rank 0 calls with each of `stops` that the replay has reached.
    trained : callable
        Function that is called with each iteration.

    Attributes
    ----------
    difference : Difference or None
        The first difference, on rank 0.
    handover : (arrays, facts) or None
        The state at the end of a part, from which the next part resumes.
    """

    sees_state = True  # the place of this hook is that of the recorder

    def __init__(
        self,
        certificate: Certificate,
        stops: Sequence[int],
        passed: Callable[[int], object] = lambda iteration: None,
        trained: Callable[[int], object] = lambda iteration: None,
    ) -> None:
        self.states = {link["iteration"]: link for link in certificate.of_kind(STATE)}
        self.validations = {link["iteration"]: link for link in certificate.of_kind(VALIDATION)}
        self.end_link = certificate.end
        self.loss = certificate.of_kind(START)[0]["network"]["loss"]
        self.intervals = [(s["iteration"], _intervals(s)) for s in certificate.of_kind(START)]
        self.stops, self.passed, self.trained = list(stops), passed, trained
        self.part_end, self.is_last_part = self.stops[-1], True
        self.difference: Difference | None = None
        self.handover: tuple[Arrays, dict[str, Any]] | None = None
        self.losses: dict[int, float | None] = {}
        self.scores: dict[int, dict[str, Any]] = {}  # of validations
        self.compared = 0  # the last iteration whose validation has been compared
        self._missing: tuple[int, int] | None = None  # state after a rollback that has yet to come
        self._is_past = False  # whether the replay keeps no state to which the run rolled back
        self._kept: tuple[Any, Any] = {}, {}  # the state to roll back to, at the last state
        self._best = states.BestDigests()

    def begin(self, part_end: int, is_last: bool) -> None:
        """Prepare for a part of the replay, which ends with an iteration."""
        self.part_end, self.is_last_part, self.handover = part_end, is_last, None

    @property
    def is_to_the_end(self) -> bool:
        """Whether the replay ends as the run did, with the network that the run returned."""
        return self.is_last_part and self.end_link["iteration"] == self.stops[-1]

    def start(self, trainer: Trainer) -> None:
        position, count = trainer.position, len(trainer.queue)
        if position.batch > count:
            text = f"mini-batch {position.batch} of epoch {position.epoch}, which has {count}"
            raise Unreachable(f"the state is after {text}")
        if (loss := plain(trainer.net.loss)) != self.loss:
            raise Unreachable(f"the loss of the network is {loss}, was {self.loss}")
        trainer.writer.listeners.append(lambda record: self._validated(trainer, record))
        self._follow_rollbacks(trainer)
        if trainer.position.iteration == 0:
            self._reach(trainer)
        else:
            self._stop_like_the_run(trainer)

    def iteration(self, trainer: Trainer, result: StepResult) -> None:
        self.losses[result.info.iteration] = metrics.number(result.loss)
        self.trained(result.info.iteration)

    def step(self, trainer: Trainer) -> None:
        if not trainer.at_epoch_end:
            self._reach(trainer)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        self._reach(trainer)

    def end(self, trainer: Trainer) -> None:
        iteration, last = trainer.position.iteration, self.stops[-1]
        if trainer.world.rank or trainer.stopped not in COMPLETE or self.difference is not None:
            return
        if self.is_to_the_end and iteration == last and self._missing is None:
            self._compare_end(trainer)
            if self.difference is None:
                self.passed(last)
        elif self._missing is not None:
            self._differ_in_rollbacks()
        elif iteration < last:
            self.differ(iteration, f"the replay ends here, the run after iteration {last} or later")

    def _reach(self, trainer):
        """Compare the state if the certificate has one, and stop if this is the last one."""
        iteration, rollbacks = trainer.position.iteration, trainer.position.rollbacks
        if self.difference is not None:
            return
        if iteration in self.validations and iteration < self.end_link["iteration"]:
            self._validate_like_the_run(trainer)
        is_compared = False
        self._follow_rollbacks(trainer)
        if iteration in self.states or iteration >= self.part_end:
            trainer.wait()  # other iterations do not wait for a GPU
        if trainer.world.rank == 0:
            is_compared = self._compare(trainer, iteration, rollbacks)
            is_end = self.is_to_the_end and iteration == self.stops[-1]
            if is_compared and self.difference is None and iteration in self.stops and not is_end:
                self.passed(iteration)
        is_last = iteration == self.stops[-1]
        if iteration == self.part_end and not self.is_last_part:
            self.handover = _snapshot(trainer)
            self._stop(trainer)
        elif self.difference is not None or (is_compared and is_last and not self.is_to_the_end):
            self._stop(trainer)
        else:
            self._stop_like_the_run(trainer)

    def _follow_rollbacks(self, trainer):
        """Until the run rolled back, keep the state to which it did so, if a job began there.

        This job has seen only the end of the iterations that it repeated. A replay makes them all
        with the options of this job, which may keep other states.
        """
        rollback, link = trainer.rollback, self.states.get(trainer.position.iteration)
        if rollback is None or link is None:
            return
        if trainer.position.rollbacks >= link["rollbacks"]:
            self._kept = rollback.arrays, rollback.facts
        elif self._began_at_kept():
            rollback.arrays, rollback.facts = self._kept

    def _began_at_kept(self):
        """Return whether a later job began at the state to roll back to."""
        kept = self._kept[1].get("position", {}).get("iteration")
        return sum(first == kept for first, _ in self.intervals) > (kept == 0)

    def _stop_like_the_run(self, trainer):
        is_end = self.is_to_the_end and trainer.position.iteration == self.stops[-1]
        if is_end and self.end_link["stopped"] == OUTPUT_FUNCTION:
            trainer.stop()

    def _validate_like_the_run(self, trainer):
        """Validate if a hook of the run did so. The trainer has made all other validations."""
        validation = trainer.validation
        if validation.store is not None and validation.last_iteration != trainer.position.iteration:
            trainer.validate(announce=False)

    def _stop(self, trainer):
        trainer.signals.name = trainer.signals.name or REACHED

    def differ(self, iteration: int, text: str) -> None:
        """Record the first difference."""
        self.difference = self.difference or Difference(iteration, text)

    def _compare(self, trainer, iteration, rollbacks):
        """Compare a state, and return whether this is done. A rollback may have yet to come."""
        link = self.states.get(iteration)
        if iteration > self.end_link["iteration"] and self._missing is not None:
            self._differ_in_rollbacks()
        elif iteration > self.end_link["iteration"]:
            self.differ(iteration, "the options train on, but the run has ended")
        elif self._missing is not None and rollbacks < self._missing[1]:
            self._await_rollback(trainer, iteration)
        elif link is None:
            if trainer.position.batch == 0 or self._is_due(iteration):
                self.differ(iteration, "the certificate has no state of this iteration")
        elif rollbacks < link["rollbacks"]:
            self._missing = iteration, link["rollbacks"]
            self._await_rollback(trainer, iteration)
        elif rollbacks > link["rollbacks"]:
            count = link["rollbacks"]
            self.differ(iteration, f"the replay has rolled back {rollbacks} times, the run {count}")
        else:
            self._missing = None
            self._compare_state(trainer, link)
            return True
        return False

    def _is_due(self, iteration):
        """Return whether the run had to record a state, by the options of the job at that time."""
        *_, current = [n for first, n in self.intervals if first < iteration or not first]
        return any(interval and iteration % interval == 0 for interval in current)

    def _await_rollback(self, trainer, iteration):
        """Differ if the run rolled back to a state that the replay no longer keeps."""
        interval, options = trainer.options.checkpoint_every, trainer.options
        is_kept = trainer.position.batch == 0 or bool(interval and iteration % interval == 0)
        if options.on_nan != "rollback" or self._is_past:
            self._differ_in_rollbacks()
        self._is_past = is_kept and not self._began_at_kept()

    def _differ_in_rollbacks(self):
        state, rollbacks = self._missing
        self.differ(state, f"the run has rolled back {rollbacks} times, the replay has not")

    def _compare_state(self, trainer, link):
        iteration, losses = link["iteration"], link["losses"]
        for i, loss in enumerate(losses, iteration - len(losses) + 1):
            if self.losses.get(i, loss) != loss:
                self.differ(i, f"the loss is {self.losses[i]}, was {loss}")
        self._compare_validations(iteration)
        state = states.state_of(trainer)
        differing = _differing(link["tables"], state["tables"])
        names = ("epoch", "progress")
        differing += [name for name in names if state[name] != link[name]]
        if differing:
            self.differ(iteration, f"{', '.join(differing)} differ")

    def _compare_validations(self, last, is_end=False):
        """Compare the validations up to an iteration.

        The validation of the last iteration may follow the state, at the end of the run.
        """
        for i in sorted({*self.validations, *self.scores}):
            if not self.compared < i <= last:
                continue
            expected, computed = self.validations.get(i), self.scores.get(i)
            if i == last and computed is None and not is_end:
                continue
            if expected is None or computed is None:
                whose = "the certificate" if expected is None else "the replay"
                self.differ(i, f"{whose} has no validation of this iteration")
                continue
            for name, value in computed.items():
                if value != expected[name]:
                    text = "" if name == "best" else f" is {value}, was {expected[name]}"
                    self.differ(i, f"validation: {name}{text or ' differs'}")
        self.compared = last - 1

    def _validated(self, trainer, record):
        if record["kind"] != "validation" or trainer.world.rank:
            return
        best = self._best.digests_of(trainer.validation.best)
        scores = {name: metrics.number(record[name]) for name in ("loss", "accuracy")}
        self.scores[record["iteration"]] = {**scores, "best": best}

    def _compare_end(self, trainer):
        """Compare the results of the run."""
        link, last = self.end_link, self.stops[-1]
        self._compare_validations(last, is_end=True)
        loss, accuracy = trainer.validation.of_the_result()
        validation = None
        if trainer.validation.store is not None and loss is not None:
            validation = {"loss": metrics.number(loss), "accuracy": metrics.number(accuracy)}
        computed = {
            "stopped": trainer.stopped,
            "returned_iteration": trainer.returned_iteration,
            "validation": validation,
            "weights": model_file.weights_sha256(trainer.net),
        }
        for name, value in computed.items():
            if value != link[name]:
                self.differ(last, f"{name.replace('_', ' ')}: {value}, was {link[name]}")


def _snapshot(trainer):
    arrays, facts = run_state.collect(trainer)
    return run_state.copied(arrays), {"position": asdict(trainer.position), **facts}


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


def _validations_before(certificate, iteration, facts):
    """Return the links of the validations that a checkpoint has.

    A validation of its iteration may have come later: at the end of the run, or because a signal
    interrupted it.
    """
    links = [v for v in certificate.of_kind(VALIDATION) if v["iteration"] <= iteration]
    saved = facts.get("validation")
    is_known = isinstance(saved, dict) and saved.get("at") == iteration and not _is_owed(facts)
    is_last = bool(links) and links[-1]["iteration"] == iteration
    return links[:-1] if is_last and not is_known else links


def _is_owed(facts):
    """Return whether a resumed run first makes the validation of the checkpoint's iteration."""
    saved = facts.get("validation")
    return isinstance(saved, dict) and saved.get("owed") is True


def _validation_facts(links, facts):
    """Return the state of the validations at a checkpoint, from the links of the certificate."""
    state: dict[str, Any] = {"loss": float("inf"), "accuracy": None, "iteration": 0}
    state |= {"waited": 0, "owed": _is_owed(facts)}
    for link in links:
        if link["loss"] is not None and link["loss"] < state["loss"]:
            state |= {name: link[name] for name in ("loss", "accuracy", "iteration")}
            state["waited"] = 0
        else:
            state["waited"] += 1
    if links:
        last = links[-1]
        loss = float("nan") if last["loss"] is None else last["loss"]
        state |= {"last": [last["accuracy"], loss, 0], "at": last["iteration"]}
    return state
