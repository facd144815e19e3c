"""The hook that compares a replay with the links of a certificate, and ends the replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidl.certificates import settings, states
from mpidl.certificates.certificate import Certificate
from mpidl.certificates.chain import START, STATE, VALIDATION
from mpidl.certificates.covered import Arrays, differing_names
from mpidl.certificates.recording import plain
from mpidl.errors import Fault
from mpidl.report import metrics
from mpidl.training.files import model_file, run_state
from mpidl.training.progress import OUTPUT_FUNCTION, PATIENCE, EpochSummary

if TYPE_CHECKING:
    from mpidl.training.steps import StepResult
    from mpidl.training.trainer import Trainer


COMPLETE = (None, PATIENCE, OUTPUT_FUNCTION)  # reasons for the end of a run with its network
REACHED = "audit"  # the reason for which a replay stops; the network is then not finished


class Difference(NamedTuple):
    """What differs from the certificate, and the first iteration in which it does."""

    iteration: int
    text: str


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
        self._rollback_state: tuple[Any, Any] = (
            {},
            {},
        )  # the state to roll back to, at the last state
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
            self._rollback_state = rollback.arrays, rollback.facts
        elif self._began_at_kept():
            rollback.arrays, rollback.facts = self._rollback_state

    def _began_at_kept(self):
        """Return whether a later job began at the state to roll back to."""
        rollback_to = self._rollback_state[1].get("position", {}).get("iteration")
        return sum(first == rollback_to for first, _ in self.intervals) > (rollback_to == 0)

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
        if self._missing is not None:
            state, count = self._missing
            self.differ(state, f"the run has rolled back {count} times, the replay has not")

    def _compare_state(self, trainer, link):
        iteration, losses = link["iteration"], link["losses"]
        for i, loss in enumerate(losses, iteration - len(losses) + 1):
            if self.losses.get(i, loss) != loss:
                self.differ(i, f"the loss is {self.losses[i]}, was {loss}")
        self._compare_validations(iteration)
        state = states.state_of(trainer)
        differing = differing_names(link["tables"], state["tables"])
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
