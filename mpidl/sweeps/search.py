"""Propose the options of trials from the results of earlier trials, and prune trials, with Optuna.

Optuna samples and prunes. This module decides what it knows: for trial n, the trials 1 to
n - `parallel`, in the order of their numbers. A trial therefore has the same options and the same
end on any number of groups, and in a sweep that was stopped. Each trial has a new study, whose
sampler has a seed of its own. The other trials before n are in its study as running; TPE proposes
options that differ from theirs.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
import warnings
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.core import keyed
from mpidl.errors import UserError
from mpidl.files import json_object, reason, write_whole
from mpidl.report import run_files
from mpidl.sweeps import trial_folder
from mpidl.sweeps.ranges import Range
from mpidl.sweeps.sweep_file import Sweep, check_option
from mpidl.sweeps.trial_folder import COMPLETE, FAILED, FINAL_STATES, PRUNED
from mpidl.text import pip_install, printable

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from mpidl.training.progress import EpochSummary
    from mpidl.training.trainer import Trainer

RECORD = "search.json"
PAUSE = 1.0  # seconds between two looks for a file that another host has written


def optuna(path: str) -> ModuleType:
    """Import Optuna for a sweep file; raise UserError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError(
            f"{path}: [search] expected the package optuna, which is not installed "
            f"({pip_install('search')})"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Proposer:
    """Proposes the options of the trials of a search.

    Parameters
    ----------
    sweep : Sweep
        A sweep with a search.
    out : str
        Folder of the sweep, which has the results of the trials.
    """

    def __init__(self, sweep: Sweep, out: str) -> None:
        assert sweep.search is not None
        self.sweep, self.search, self.out = sweep, sweep.search, out
        self.folders = trial_folder.folders_of(sweep, out)
        self._varied: dict[int, dict[str, Any]] = {}  # proposals of trials
        self._results: dict[int, FrozenTrial] = {}

    def check(self) -> None:
        """Record the search in its folder. Raise UserError if it has begun differently."""
        version = optuna(self.sweep.path).__version__
        path = os.path.join(self.out, RECORD)
        described = {**self.search._asdict(), "optuna": version}
        described["ranges"] = {name: list(r) for name, r in self.search.ranges.items()}
        new = json.loads(json.dumps(described))
        try:
            with open(path, "rb") as file:
                old = json_object(file.read()) or {}
        except FileNotFoundError:
            old = {}
        if old == new:
            return
        begun = [f.recorded(self.sweep.varied) is not None for f in self.folders]
        if any(folder.state() != trial_folder.WAITING for folder in self.folders):
            same_version = all(begun) or old.get("optuna") == version
            names = [name for name in new if name != "optuna" or not same_version]
            if changes := [
                f"{name} was {_as_json(old.get(name))}, is {_as_json(new[name])}"
                for name in names
                if old.get(name) != new[name]
            ]:
                raise UserError(
                    f"{self.sweep.path}: the search in {self.out} has begun differently: "
                    f"{'; '.join(changes)}; expected the same, or another --out"
                )
        # Jobs of an array may start together, so each writes a file of its own first.
        own_path = f"{path}.{socket.gethostname()}-{os.getpid()}"
        write_whole(own_path, (json.dumps(new, indent=1) + "\n").encode())
        try:
            os.replace(own_path, path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {reason(error)}") from error

    def known_trials(self, number: int) -> range:
        """Return the numbers of the trials that a trial knows."""
        return range(1, max(number - self.search.parallel, 0) + 1)

    def unended(self, number: int, seconds: float = 0.0) -> list[str]:
        """Return the names of trials that must end before a trial starts.

        Wait at most `seconds` for files of other hosts, which some file systems show late.
        """
        deadline = time.monotonic() + seconds
        while True:
            folders = [self.folders[i - 1] for i in self.known_trials(number)]
            names = [folder.name for folder in folders if folder.state() not in FINAL_STATES]
            if not names or time.monotonic() >= deadline:
                return names
            time.sleep(PAUSE)

    def options(self, number: int) -> dict[str, Any]:
        """Return all options of a trial whose known trials have ended.

        A trial that has begun keeps its options.
        """
        for i in range(1, number + 1):
            if i not in self._varied:
                recorded = self.folders[i - 1].recorded(self.sweep.varied)
                self._varied[i] = recorded or self._proposed(i)
        return self.sweep.train | self._varied[number]

    def _proposed(self, number):
        library, search = optuna(self.sweep.path), self.search
        seed = int(keyed.words(search.seed, "search", 1, sample=number)[0] >> np.uint64(32))
        with warnings.catch_warnings():  # these options of TPE are experimental in Optuna 4
            warnings.simplefilter("ignore", library.exceptions.ExperimentalWarning)
            if search.sampler == "tpe":
                startup = {} if search.startup is None else {"n_startup_trials": search.startup}
                sampler = library.samplers.TPESampler(
                    seed=seed, multivariate=True, constant_liar=True, **startup
                )
            else:
                sampler = library.samplers.RandomSampler(seed=seed)
        study = self._study(self.known_trials(number), sampler=sampler)
        for i in range(len(self.known_trials(number)) + 1, number):
            study.add_trial(self._trial(i, library.trial.TrialState.RUNNING))
        params = study.ask(self._distributions()).params
        return {
            name: check_option(name, _value(choices, params[name]), f"{self.sweep.path}: {name}")
            for name, choices in search.ranges.items()
        }

    def _study(self, numbers: Iterable[int], **parts: Any):
        """Return a study of Optuna with the results of trials."""
        direction = "maximize" if self.search.is_maximized else "minimize"
        study = optuna(self.sweep.path).create_study(direction=direction, **parts)
        for number in numbers:
            if number not in self._results:
                self._results[number] = self._result(number)
            study.add_trial(self._results[number])
        return study

    def _distributions(self):
        library = optuna(self.sweep.path)
        ranges = sorted(self.search.ranges.items())  # the order in the file has no effect
        return {name: _distribution(library, choices) for name, choices in ranges}

    def _trial(self, number, state, **facts):
        """Return a trial in the form of Optuna, with its options and other facts."""
        options = self.options(number)
        facts["distributions"] = self._distributions()
        create = optuna(self.sweep.path).trial.create_trial
        try:
            params = {name: _param(r, options[name]) for name, r in self.search.ranges.items()}
            return create(state=state, params=params, **facts)
        except (TypeError, ValueError):
            raise UserError(
                f"{printable(self.folders[number - 1].path)}: expected options in the ranges of "
                f"{self.sweep.path}, found {self._varied[number]}"
            ) from None

    def _result(self, number):
        """Return an ended trial in the form of Optuna."""
        states = optuna(self.sweep.path).trial.TrialState
        folder, facts = self.folders[number - 1], {}
        row = folder.row()
        score = row.get(self.search.metric)
        if row["state"] == FAILED or (row["state"] == COMPLETE and not _is_finite(score)):
            return self._trial(number, states.FAIL)
        if self.search.pruner != "none":
            values = folder.validations(self.search.metric)
            facts["intermediate_values"] = dict(enumerate(values, 1))
            # Of a study without other trials, the pruner keeps the trial's scores at its rungs.
            judge = Judge(self, ())
            judge.is_hopeless(values)
            facts["system_attrs"] = judge.attributes()
        if row["state"] == PRUNED:
            return self._trial(number, states.PRUNED, **facts)
        return self._trial(number, states.COMPLETE, value=score, **facts)

    def pruner(self) -> Any:
        """Return the pruner of Optuna. A trial's validations are its steps, counted from 1."""
        pruners, first = optuna(self.sweep.path).pruners, self.search.warmup + 1
        if self.search.pruner == "asha":
            return pruners.SuccessiveHalvingPruner(min_resource=first)
        startup = self.search.startup
        startups = {} if startup is None else {"n_startup_trials": startup}
        return pruners.MedianPruner(n_warmup_steps=first, **startups)

    def study_for_pruning(self, numbers: Iterable[int]) -> Any:
        """Return a study that has a pruner and the results of trials."""
        return self._study(numbers, pruner=self.pruner())


class Judge:
    """Decides whether a trial is hopeless, from its validations and those of known trials.

    `values` are the validations so far.
    """

    def __init__(self, proposer: Proposer, numbers: Iterable[int]) -> None:
        self._study = proposer.study_for_pruning(numbers)
        self._trial = self._study.ask()
        self.values: list[float] = []

    def is_hopeless(self, new_values: Sequence[float]) -> bool:
        """Return whether to prune the trial after the last of its new validations."""
        is_hopeless = False
        for value in new_values:
            self.values.append(value)
            self._trial.report(value, len(self.values))
            is_hopeless = self._trial.should_prune()
        return is_hopeless

    def attributes(self) -> dict[str, Any]:
        """Return what the pruner has noted about the trial."""
        return dict(self._study.get_trials(deepcopy=False)[self._trial.number].system_attrs)


class SearchHook:
    """Hook of a trial of a search: it requires the metric, and ends the trial if it is hopeless.

    `pruned_after` is the number of validations after which the trial was pruned, or None.
    """

    def __init__(self, proposer: Proposer, number: int) -> None:
        self._proposer, self._number = proposer, number
        self._judged_at: tuple[int, int] | None = None
        self._judge: Judge | None = None
        self.pruned_after: int | None = None

    def start(self, trainer: Trainer) -> None:
        metric = self._proposer.search.metric
        if metric.startswith("validation") and trainer.validation.store is None:
            raise UserError(
                f"[search] metric {metric}: expected validation images (validation_data, "
                "validation_fraction or fold), found none"
            )
        self._look(trainer)  # a run that is resumed may have ended with a hopeless validation

    def step(self, trainer: Trainer) -> None:
        self._look(trainer)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        self._look(trainer)

    def _look(self, trainer):
        """Prune the trial if its last validation is new and hopeless. Collective."""
        position, validation = trainer.position, trainer.validation
        newest = validation.last_iteration, position.rollbacks
        if self._proposer.search.pruner == "none" or newest in (self._judged_at, (0, 0)):
            return
        if self.pruned_after is not None:
            return  # the run ends after the current mini-batch, whose validation does not count
        self._judged_at = newest
        if position.iteration >= trainer.total_iterations:
            return  # the trial has its result
        name = self._proposer.search.metric.removeprefix("validation_")
        values = getattr(trainer.history.validation, name).tolist()
        if trainer.world.broadcast(trainer.world.rank == 0 and self._is_hopeless(values)):
            self.pruned_after = len(values)
            trainer.stop()

    def _is_hopeless(self, values):
        judge = self._judge
        if judge is None or judge.values != values[: len(judge.values)]:  # after a rollback
            numbers = self._proposer.known_trials(self._number)
            judge = self._judge = Judge(self._proposer, numbers)
        return judge.is_hopeless(values[len(judge.values) :])


def missing_score(folder: str, metric: str) -> UserError | None:
    """Return the error of a finished trial that lacks the metric of its search, or None."""
    if _is_finite(run_files.read_summary(folder).get(metric)):
        return None
    return UserError(f"[search] metric {metric}: expected this score of the trial, found none")


def _distribution(library, choices: Range) -> Any:
    """Return a range in the form of Optuna. Choices are numbers from 0."""
    distributions, (kind, low, high, step, values) = library.distributions, choices
    if kind == "choices":
        return distributions.CategoricalDistribution(range(len(values)))
    if kind == "integers":
        return distributions.IntDistribution(low, high, step=step or 1)
    if kind == "log_uniform":
        return distributions.FloatDistribution(low, high, log=True)
    return distributions.FloatDistribution(low, high, step=step)


def _value(choices, param):
    """Return the value of an option for a parameter of Optuna."""
    if choices.kind == "choices":
        return choices.values[param]
    return param if choices.kind == "integers" else choices.rounded(param)


def _param(choices, value):
    """Return the parameter of Optuna for the value of an option."""
    if choices.kind == "choices":
        return choices.values.index(value)
    return int(value) if choices.kind == "integers" else float(value)


def _is_finite(score):
    return isinstance(score, int | float) and math.isfinite(score)


def _as_json(value):
    return "unset" if value is None else json.dumps(value)
