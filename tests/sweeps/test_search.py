"""Test searches: proposals and prunings of a plain Optuna program, whatever the groups' speed."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from image_sets import refusal

from mpidl.core import keyed
from mpidl.sweeps import sweep_file, trial_folder
from mpidl.sweeps.search import Judge, Proposer, SearchHook
from mpidl.sweeps.trial_folder import COMPLETE, FAILED, PRUNED

optuna = pytest.importorskip("optuna", reason="pip install 'mpidl[search]'")
distributions = optuna.distributions

TEXT = """
[search]
count = 24
metric = "validation_accuracy"
search_seed = 3
startup = 4
parallel = {parallel}
sampler = "{sampler}"
pruner = "{pruner}"
momentum = {{ uniform = [0.0, 0.75], step = 0.25 }}
batch_size = {{ integers = [32, 512], step = 32 }}
solver = ["sgdm", "adam"]
"""
SPACE = {
    "batch_size": distributions.IntDistribution(32, 512, step=32),
    "momentum": distributions.FloatDistribution(0.0, 0.75, step=0.25),
    "solver": distributions.CategoricalDistribution(range(2)),
}
VALIDATIONS = 6


@pytest.fixture
def read(tmp_path):
    """A function that reads the sweep of this module with other values of its keys."""

    def read_text(sampler="tpe", parallel=1, pruner="none", extra_text=""):
        path = tmp_path / "sweep.toml"
        path.write_text(TEXT.format(sampler=sampler, parallel=parallel, pruner=pruner) + extra_text)
        return sweep_file.read(path)

    return read_text


def scores(options):
    """Return the accuracy of each validation of a trial, which its options determine."""
    rate = math.log10(options.get("learning_rate", 0.01))
    best = 0.9 - abs(options["batch_size"] - 200) / 800 - abs(options["momentum"] - 0.5) / 4
    best -= (options["solver"] == "sgdm") / 10 + abs(rate + 2) / 20
    return [best * (1 - 0.5**step) for step in range(1, VALIDATIONS + 1)]


def finish(proposer, number, options):
    """Write the files of a trial that trains with these options and has ended."""
    folder = proposer.folders[number - 1]._replace(options=options)
    values, pruned_after = scores(options), None
    if proposer.search.pruner != "none":
        judge = Judge(proposer, proposer.known_trials(number))
        steps = range(1, VALIDATIONS)  # after the last validation, the trial has its result
        pruned_after = next((i for i in steps if judge.is_hopeless(values[i - 1 : i])), None)
    folder.write(PRUNED if pruned_after else COMPLETE, validations=pruned_after)
    with open(f"{folder.path}/metrics.jsonl", "w") as file:
        for i, value in enumerate(values[:pruned_after], 1):
            record = {"kind": "validation", "epoch": 1, "iteration": i, "accuracy": value}
            file.write(json.dumps(record) + "\n")
    if not pruned_after:
        with open(f"{folder.path}/summary.json", "w") as file:
            json.dump({"validation_accuracy": values[-1]}, file)
    return pruned_after


def search(sweep, out):
    """Return the options of all trials, one after the other, and where they were pruned."""
    proposer, trials = Proposer(sweep, str(out)), []
    for number in range(1, len(sweep.trials) + 1):
        options = proposer.options(number)
        trials.append((options, finish(proposer, number, options)))
    return trials


def seed_of(number):
    return int(keyed.words(3, "search", 1, sample=number)[0] >> np.uint64(32))


def sampler_of(name, number):
    if name == "random":
        return optuna.samplers.RandomSampler(seed=seed_of(number))
    return optuna.samplers.TPESampler(
        seed=seed_of(number), multivariate=True, constant_liar=True, n_startup_trials=4
    )


PRUNERS = {
    "none": optuna.pruners.NopPruner(),
    "median": optuna.pruners.MedianPruner(n_startup_trials=4),
    "asha": optuna.pruners.SuccessiveHalvingPruner(min_resource=1),
}


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    ("sampler", "pruner"), [("random", "none"), ("tpe", "none"), ("tpe", "median"), ("tpe", "asha")]
)
def test_trials_are_those_of_a_plain_optuna_program(read, tmp_path, sampler, pruner):
    """With `parallel = 1`, a trial knows all trials before it, like a loop over one study."""
    study = optuna.create_study(direction="maximize", pruner=PRUNERS[pruner])
    expected = []
    for number in range(1, 25):
        study.sampler = sampler_of(sampler, number)
        trial, pruned_after = study.ask(SPACE), None
        options = {**trial.params, "solver": ("sgdm", "adam")[trial.params["solver"]]}
        values = scores(options)
        for step, value in enumerate(values, 1):
            trial.report(value, step)
            if pruned_after is None and step < VALIDATIONS and trial.should_prune():
                pruned_after = step
                break
        states = optuna.trial.TrialState
        arguments = {"state": states.PRUNED} if pruned_after else {"values": values[-1]}
        study.tell(trial, **arguments)
        expected.append((options, pruned_after))
    assert search(read(sampler, pruner=pruner), tmp_path / "out") == expected
    assert (pruner == "none") == all(pruned_after is None for _, pruned_after in expected)
    values = [scores(options)[-1] for options, _ in expected]
    if sampler == "tpe":
        assert np.mean(values[12:]) > np.mean(values[:4])  # it has learned


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_trial_knows_the_results_before_those_in_parallel(read, tmp_path):
    """The results up to n - parallel are told in order, and the trials after them are running."""
    sweep = read(parallel=5, extra_text="learning_rate = { log_uniform = [1e-4, 1.0] }\n")
    out, proposer = tmp_path / "out", Proposer(sweep, str(tmp_path / "out"))
    space = SPACE | {"learning_rate": distributions.FloatDistribution(1e-4, 1.0, log=True)}
    states, results = optuna.trial.TrialState, []
    for number in range(1, 25):
        study = optuna.create_study(direction="maximize", sampler=sampler_of("tpe", number))
        for i, (params, state, score) in enumerate(results, 1):
            state, score = (state, score) if i <= number - 5 else (states.RUNNING, None)
            study.add_trial(
                optuna.trial.create_trial(
                    state=state, value=score, params=params, distributions=space
                )
            )
        params = study.ask(dict(sorted(space.items()))).params
        params["learning_rate"] = float(f"{params['learning_rate']:.6g}")
        options = {**params, "solver": ("sgdm", "adam")[params["solver"]]}
        assert proposer.options(number) == options, number
        if number == 7:  # a trial that fails
            folder = proposer.folders[6]._replace(options=options)
            folder.write(FAILED, "no network")
            results.append((params, states.FAIL, None))
        else:
            finish(proposer, number, options)
            results.append((params, states.COMPLETE, scores(options)[-1]))
    # A new process reads them from the folders, and proposes the ones that are missing.
    assert Proposer(sweep, str(out)).options(24) == options
    (out / "trial-024" / "trial.json").unlink()
    assert Proposer(sweep, str(out)).options(24) == options


class KnowsAllThatHaveEnded(Proposer):
    """A search whose trials know all results at the time when they start."""

    finished_trials: tuple[int, ...] = ()

    def known_trials(self, number):
        return self.finished_trials


def timed_search(sweep, out, groups, seconds, proposers=Proposer):
    """Search with groups whose trials take some time; each trial is proposed by a new process."""
    free, ends, waiting, trials = [0.0] * groups, {}, {}, []
    for number in range(1, len(sweep.trials) + 1):
        proposer = proposers(sweep, str(out))
        known_trials = [] if proposers is KnowsAllThatHaveEnded else proposer.known_trials(number)
        start = max([min(free), *(ends[i] for i in known_trials)])
        for i in sorted(waiting, key=ends.get):
            if ends[i] <= start:
                finish(proposer, i, waiting.pop(i))
        proposer.finished_trials = tuple(i for i in ends if i not in waiting)
        assert proposers is KnowsAllThatHaveEnded or proposer.unended(number) == []
        options = proposer.options(number)
        proposer.folders[number - 1]._replace(options=options).write(trial_folder.RUNNING)
        ends[number] = free[free.index(min(free))] = start + seconds(number)
        waiting[number] = options
        trials.append(options)
    for i in waiting:
        finish(proposer, i, waiting[i])
    return trials, [folder.row()["state"] for folder in proposer.folders]


SPEEDS = {
    "one group": (1, lambda number: 1.0),
    "three equal groups": (3, lambda number: 1.0),
    "a trial that is delayed": (3, lambda number: 9.5 if number == 2 else 1.0 + number % 3 / 10),
    "more groups than parallel": (9, lambda number: 1.0 + number % 5),
}


def test_trials_do_not_depend_on_the_groups_and_their_speed(read, tmp_path):
    sweep = read(parallel=4, pruner="median")._replace(trials=[{}] * 12)
    results = [
        timed_search(sweep, tmp_path / name, groups, seconds)
        for name, (groups, seconds) in SPEEDS.items()
    ]
    assert all(result == results[0] for result in results)
    assert PRUNED in results[0][1]


def test_with_all_results_at_hand_trials_would_depend_on_the_speed(read, tmp_path):
    """Negative control of the test above, which can therefore fail."""
    sweep = read()._replace(trials=[{}] * 12)
    results = [
        timed_search(sweep, tmp_path / name, *speed, proposers=KnowsAllThatHaveEnded)[0]
        for name, speed in SPEEDS.items()
    ]
    assert all(result != results[0] for result in results[1:])


def test_a_failed_trial_that_is_trained_again(read, tmp_path):
    """Trials that have begun keep their options, and later trials know the new result."""
    sweep, out = read(parallel=2), str(tmp_path / "out")
    proposer = Proposer(sweep, out)
    for number in range(1, 13):
        options = proposer.options(number)
        if number == 5:
            proposer.folders[4]._replace(options=options).write(FAILED, "no memory")
        else:
            finish(proposer, number, options)
    unchanged = Proposer(sweep, out)
    options = [unchanged.options(number) for number in range(1, 14)]
    finish(unchanged, 5, options[4])
    again = [Proposer(sweep, out).options(number) for number in range(1, 14)]
    assert again[:12] == options[:12] and again[12] != options[12]


@pytest.mark.parametrize("changed", [{"solver": "lion"}, {"batch_size": "x"}, {"batch_size": 33}])
def test_a_trial_with_options_outside_the_ranges(read, tmp_path, changed):
    sweep = read()
    proposer = Proposer(sweep, str(tmp_path))
    finish(proposer, 1, proposer.options(1))
    proposer.folders[0]._replace(options=proposer.options(1) | changed).write(COMPLETE)
    error = refusal(Proposer(sweep, str(tmp_path)).options, 2)
    assert "trial-001: expected options in the ranges of " in error and "sweep.toml" in error


def test_a_trial_without_a_score_teaches_nothing(read, tmp_path):
    """A finished trial whose summary is lost counts as a failed one."""
    proposals = []
    for state, figures in ((FAILED, None), (COMPLETE, None), (COMPLETE, {"loss": 0.5})):
        proposer = Proposer(read(), str(tmp_path / f"{state}-{figures is None}"))
        for number in range(1, 9):
            options = proposer.options(number)
            finish(proposer, number, options)
            if number == 5:
                folder = proposer.folders[4]._replace(options=options)
                folder.write(state)
                with open(f"{folder.path}/summary.json", "w") as file:
                    json.dump(figures, file)
        proposals.append(proposer.options(9))
    assert proposals[0] == proposals[1] == proposals[2]


def test_a_judge_continues_with_more_validations(read, tmp_path):
    """A resumed trial has the end that it would have had without the stop."""
    sweep = read(parallel=6, pruner="asha")
    trials = search(sweep, tmp_path / "out")
    proposer = Proposer(sweep, str(tmp_path / "out"))
    for number, (options, pruned_after) in enumerate(trials, 1):
        judge = Judge(proposer, proposer.known_trials(number))
        values = scores(options)[: pruned_after or VALIDATIONS - 1]
        assert not judge.is_hopeless(values[:-1])
        assert judge.is_hopeless(values[-1:]) == bool(pruned_after)
    assert any(pruned_after for _, pruned_after in trials)
    assert Judge(proposer, ()).is_hopeless([math.nan])


def fake_trainer(values, iterations=VALIDATIONS):
    """Return what the hook of a search reads of a trainer that has validated."""
    validation = SimpleNamespace(store="images", last_iteration=len(values))
    trainer = SimpleNamespace(stops=0, validation=validation, total_iterations=iterations)
    trainer.position = SimpleNamespace(iteration=len(values), rollbacks=0)
    trainer.history = SimpleNamespace(validation=SimpleNamespace(accuracy=np.array(values)))
    trainer.world = SimpleNamespace(rank=0, broadcast=lambda value: value)
    trainer.stop = lambda: setattr(trainer, "stops", trainer.stops + 1)
    return trainer


def test_the_hook_ends_a_hopeless_trial(read, tmp_path):
    """The end is the same if a run continues that was killed just after a hopeless validation."""
    sweep = read(parallel=2, pruner="median")
    trials = search(sweep, tmp_path / "out")
    proposer = Proposer(sweep, str(tmp_path / "out"))
    number, options, end = next((i, o, end) for i, (o, end) in enumerate(trials, 1) if end)
    values = scores(options)
    for beginning in range(1, end + 1):  # of the records of the killed run
        hook = SearchHook(proposer, number)
        hook.start(fake_trainer(values[:beginning]))
        for count in range(beginning + 1, VALIDATIONS):
            trainer = fake_trainer(values[:count])
            hook.step(trainer)
            assert trainer.stops == (count == end)
        assert hook.pruned_after == end
    hook = SearchHook(proposer, number)
    hook.start(fake_trainer(values[:end], iterations=end))  # the trial has its result
    assert hook.pruned_after is None
    trainer.validation.store = None
    error = refusal(SearchHook(proposer, number).start, trainer)
    assert error.startswith("[search] metric validation_accuracy: expected validation images (")


def test_the_hook_judges_a_trial_again_after_a_rollback(read, tmp_path):
    sweep = read(parallel=2, pruner="median")
    trials = search(sweep, tmp_path / "out")
    number, options, end = next((i, o, end) for i, (o, end) in enumerate(trials, 1) if end)
    hook = SearchHook(Proposer(sweep, str(tmp_path / "out")), number)
    hook.start(fake_trainer([1.0] * end))  # the best scores
    assert hook.pruned_after is None
    trainer = fake_trainer(scores(options)[:end])
    trainer.position.rollbacks = 1
    hook.step(trainer)
    assert hook.pruned_after == end


def test_a_trial_waits_for_those_that_it_knows(read, tmp_path):
    sweep = read(parallel=4)
    proposer = Proposer(sweep, str(tmp_path))
    assert [list(proposer.known_trials(number)) for number in (1, 4, 5, 7)] == [
        [],
        [],
        [1],
        [1, 2, 3],
    ]
    assert proposer.unended(4) == [] and proposer.unended(6) == ["trial-001", "trial-002"]
    for number, state in ((1, FAILED), (2, trial_folder.STOPPED)):
        proposer.folders[number - 1].write(state)
    assert proposer.unended(6) == ["trial-002"]


def test_another_search_is_refused(read, tmp_path, monkeypatch):
    """A search that has begun keeps its table, except for the number of trials, and its Optuna."""
    out = tmp_path / "out"
    out.mkdir()
    sweep = read()
    proposer = Proposer(sweep, str(out))
    proposer.check()
    proposer = Proposer(read(parallel=2), str(out))
    proposer.check()  # no trial has begun
    finish(proposer, 1, proposer.options(1))
    larger_sweep = read(parallel=2)._replace(trials=[{}] * 40)
    Proposer(larger_sweep, str(out)).check()
    error = refusal(Proposer(read(parallel=3, sampler="random"), str(out)).check)
    assert error == (
        f'{sweep.path}: the search in {out} has begun differently: sampler was "tpe", is "random"; '
        "parallel was 2, is 3; expected the same, or another --out"
    )
    monkeypatch.setattr(optuna, "__version__", "3.9")
    error = refusal(Proposer(read(parallel=2), str(out)).check)
    assert f'optuna was "{json.loads((out / "search.json").read_text())["optuna"]}", is' in error
    single_trial = read(parallel=2)._replace(trials=[{}])
    Proposer(single_trial, str(out)).check()  # nothing is left to propose
    (out / "search.json").unlink()
    assert "has begun differently: sampler was unset" in refusal(proposer.check)


def test_jobs_of_an_array_that_start_together(read, tmp_path, monkeypatch):
    """Another job records the search while this one does."""
    proposer, fsync, codes = Proposer(read(), str(tmp_path)), os.fsync, []
    program = "import sys\nfrom mpidl.sweeps import search, sweep_file\n"
    program += "search.Proposer(sweep_file.read(sys.argv[1]), sys.argv[2]).check()"

    def slow_fsync(descriptor):
        fsync(descriptor)
        if not codes:
            words = [sys.executable, "-c", program, proposer.sweep.path, str(tmp_path)]
            codes.append(subprocess.run(words).returncode)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    proposer.check()
    assert codes == [0]
    assert sorted(os.listdir(tmp_path)) == ["search.json", "sweep.toml"]
    monkeypatch.setattr(os, "replace", None)  # nothing is written again
    Proposer(read(), str(tmp_path)).check()


def test_without_optuna(read, tmp_path, monkeypatch):
    proposer = Proposer(read(), str(tmp_path))
    monkeypatch.setitem(sys.modules, "optuna", None)
    error = refusal(proposer.check)
    assert error.startswith(f"{proposer.sweep.path}: [search] expected the package optuna, which ")
    assert "pip install" in error and "[search]" in error and "\n" not in error
