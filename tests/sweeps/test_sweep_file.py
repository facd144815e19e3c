"""Test sweep files: each kind of search, and errors that name the table and the key."""

import math

import numpy as np
import pytest
from image_sets import refusal

from mpidl.sweeps import ranges, sweep_file
from mpidl.training.options.configuration import DECLARED


@pytest.fixture
def read(tmp_path):
    """A function that reads a sweep from a text. `read.path` is the path of its file."""
    path = tmp_path / "sweep.toml"

    def read_text(text):
        path.write_text(text)
        return sweep_file.read(path)

    read_text.path = path
    return read_text


def test_grid(read):
    sweep = read(
        '[train]\nepochs = 2\nnetwork = "digits"\n'
        '[grid]\nlearning-rate = [0.1, 0.01]\nsolver = ["sgdm", "adam"]\nrandom_crop = [[8, 8]]\n'
    )
    assert sweep.train == {"epochs": 2, "network": "digits"}
    assert [list(trial.values()) for trial in sweep.trials] == [
        [0.1, "sgdm", "8x8"],
        [0.1, "adam", "8x8"],
        [0.01, "sgdm", "8x8"],
        [0.01, "adam", "8x8"],
    ]
    assert sweep.varied == ["learning_rate", "solver", "random_crop"]
    assert sweep.options(1)["solver"] == "adam" and sweep.options(1)["epochs"] == 2


def test_listed(read):
    sweep = read("[train]\nseed = 3\n[[trial]]\n[[trial]]\nseed = 4\nl2 = 0.1\n[[trial]]\nl2 = 0\n")
    assert [sweep.options(i) for i in range(3)] == [
        {"seed": 3},
        {"seed": 4, "l2": 0.1},
        {"seed": 3, "l2": 0.0},
    ]
    assert sweep.varied == ["seed", "l2"]


RANDOM = """
[random]
count = 400
learning_rate = { log_uniform = [1e-4, 1e-1] }
momentum = { uniform = [0.8, 0.9] }
batch_size = { integers = [5, 8] }
solver = ["sgdm", "adam"]
"""


def test_random(read):
    """Random values are spread over their range, and depend only on the seed and the option."""
    trials = read(RANDOM).trials
    columns = {name: [trial[name] for trial in trials] for name in trials[0]}
    logs = np.log10(columns["learning_rate"])
    assert -4 <= logs.min() < -3.9 and -1.1 < logs.max() <= -1 and abs(logs.mean() + 2.5) < 0.15
    momenta = np.array(columns["momentum"])
    assert 0.8 <= momenta.min() and momenta.max() <= 0.9 and abs(momenta.mean() - 0.85) < 0.005
    assert {n: columns["batch_size"].count(n) > 70 for n in (5, 6, 7, 8)} == dict.fromkeys(
        (5, 6, 7, 8), True
    )
    assert set(columns["batch_size"]) == {5, 6, 7, 8} and set(columns["solver"]) == {"sgdm", "adam"}
    assert all(float(f"{x:.6g}") == x for x in columns["learning_rate"] + columns["momentum"])
    assert read(RANDOM).trials == trials
    fewer = read(RANDOM.replace("momentum", "# momentum")).trials
    assert [trial["learning_rate"] for trial in fewer] == columns["learning_rate"]
    other = read(RANDOM + "search_seed = 1\n").trials
    assert read(RANDOM + "search-seed = 1\n").trials == other
    assert [trial["learning_rate"] for trial in other] != columns["learning_rate"]
    assert read(RANDOM.replace("400", "3")).trials == trials[:3]
    assert math.isclose(trials[0]["learning_rate"], columns["learning_rate"][0])


def test_search(read):
    """A search has the keys of its table, their defaults, and ranges in the order of the file."""
    sweep = read(
        '[train]\nl2 = 0.1\n[search]\ncount = 3\nmetric = "validation_loss"\nsearch-seed = 7\n'
        'solver = ["sgdm", "adam"]\nlearning-rate = { log_uniform = [1e-4, 0.1] }\n'
        "random_crop = [[8, 8], [9, 9]]\nbatch_size = { integers = [32, 256], step = 32 }\n"
    )
    search = sweep.search
    assert (sweep.trials, sweep.options(1)) == ([{}] * 3, {"l2": 0.1})
    assert sweep.varied == ["solver", "learning_rate", "random_crop", "batch_size"]
    assert (search.sampler, search.metric, search.seed) == ("tpe", "validation_loss", 7)
    assert (search.parallel, search.pruner, search.startup, search.warmup) == (8, "none", None, 0)
    assert not search.is_maximized
    assert search.ranges["random_crop"].values == ("8x8", "9x9")
    assert search.ranges["batch_size"][:4] == ("integers", 32, 256, 32)


def test_rounded_numbers_stay_within_the_bounds():
    """Values have six digits, except for bounds with more digits."""
    for kind in ("uniform", "log_uniform"):
        choices = ranges.read({kind: [0.1234564, 0.1234567]}, "x")
        assert choices.draw(0.0) == 0.1234564 and choices.draw(1 - 2**-53) == 0.1234567
        choices = ranges.read({kind: [0.1, 0.9]}, "x")
        value = choices.draw(1 / 3)
        assert value == float(f"{value:.6g}") and 0.1 < value < 0.9


def test_steps(read):
    """Values of a range with a step are its lower bound and multiples of the step above it."""
    trials = read(
        "[random]\ncount = 400\nbatch_size = { integers = [32, 96], step = 32 }\n"
        "l2 = { uniform = [0.1, 0.4], step = 0.1 }\n"
    ).trials
    assert {trial["batch_size"] for trial in trials} == {32, 64, 96}
    assert {trial["l2"] for trial in trials} == {0.1, 0.2, 0.3, 0.4}


SEARCH = "[search]\ncount = 2\nmetric = 'validation_loss'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nepochs = 2", "expected one of [grid], [[trial]], [random] and [search], found"),
        ("[grid]\nseed = [1]\n[[trial]]\nseed = 1", "found [grid] and [[trial]]"),
        ("[gird]\nseed = [1]", "unknown table [gird]: did you mean grid?"),
        ("epochs = 3\n[grid]\nseed = [1]", "unknown table [epochs]: expected [train], "),
        ("[grid]", "[grid] must have lists of values, found none"),
        ("[grid]\nseed = 1", "[grid] seed must be a list of values, found 1"),
        ("[grid]\nseed = []", "[grid] seed must be a list of values, found []"),
        ("[grid]\nsead = [1]", "[grid] sead: unknown option: did you mean seed?"),
        ("[grid]\nepochs = [1, 0]", "[grid] epochs must be at least 1, found 0"),
        ("[train]\nlr = 1\n[grid]\nseed = [1]", "[train] lr: unknown option: did you mean learn"),
        ("[[trial]]\n[[trial]]\nl2 = -1", "[[trial]] 2: l2 must be at least 0, found -1"),
        ("trial = 3", "[[trial]] must be tables, found 3"),
        ("train = 3\n[grid]\nseed = [1]", "[train] must be a table, found 3"),
        ("[random]\nseed = [1]", "[random] expected count, the number of trials, found none"),
        ("[random]\ncount = 3", "[random] must have ranges of options, found none"),
        ("[random]\ncount = 0\nseed = [1]", "[random] count must be at least 1, found 0"),
        ("[random]\ncount = 2\nl2 = 0.1", "[random] l2 must be a list of choices or one of"),
        ("[random]\ncount = 2\nl2 = { unifrom = [0, 1] }", "did you mean uniform?"),
        ("[random]\ncount = 2\nl2 = { uniform = [1, 0] }", "uniform must be two numbers, the low"),
        ("[random]\ncount = 2\nl2 = { log_uniform = [0, 1] }", "must be two positive numbers"),
        ("[random]\ncount = 2\nseed = { integers = [0, 1.5] }", "must be two whole numbers"),
        ("[random]\ncount = 2\nepochs = { uniform = [1, 9] }", "epochs must be a whole number"),
        (
            "[search]\ncount = 2\nl2 = [0]",
            "[search] expected metric, which is validation_accuracy, ",
        ),
        (
            SEARCH + "sampler = 'tpa'\nl2 = [0]",
            "[search] sampler must be tpe or random, found 'tpa'",
        ),
        (
            SEARCH.replace("loss", "f1") + "l2 = [0]",
            "[search] metric must be validation_accuracy, ",
        ),
        (SEARCH + "pruner = 'hyperband'\nl2 = [0]", "pruner must be none, median or asha, found"),
        (
            SEARCH.replace("validation_", "") + "pruner = 'asha'\nl2 = [0]",
            "pruner asha must have a metric of validation, found loss",
        ),
        (SEARCH + "parallel = 0\nl2 = [0]", "[search] parallel must be at least 1, found 0"),
        (SEARCH + "paralel = 3\nl2 = [0]", "[search] paralel: unknown key: did you mean parallel?"),
        (SEARCH, "[search] must have ranges of options, found none"),
        (SEARCH + "l2 = 0.1", "[search] l2 must be a list of choices or one of"),
        (SEARCH + "l2 = { uniform = [1, 0] }", "l2: uniform must be two numbers, the lowest and"),
        (SEARCH + "l2 = { log_uniform = [0, 1] }", "l2: log_uniform must be two positive numbers"),
        (
            SEARCH + "l2 = { log_uniform = [1, 2], step = 1 }",
            "step must belong to uniform or integ",
        ),
        (SEARCH + "l2 = { uniform = [-1, 1] }", "[search] l2 must be at least 0, found -1.0"),
        (SEARCH + "momentum = { uniform = [0.1, 1.5] }", "[search] momentum must be "),
        (SEARCH + "l2 = [0.1, -0.1]", "[search] l2 must be at least 0, found -0.1"),
        (SEARCH + "epochs = { uniform = [1, 9] }", "[search] epochs must be a whole number, at"),
        (SEARCH + "random_crop = { integers = [8, 9] }", "random_crop must be a list of choices, "),
        (
            SEARCH + "batch_size = { integers = [32, 256], step = 30 }",
            "batch_size: step must divide the range from 32 to 256, found 30",
        ),
        (
            SEARCH + "batch_size = { integers = [8, 9], step = 0.5 }",
            "step must be a positive whole",
        ),
        (SEARCH + "l2 = { uniform = [0, 1], step = 0 }", "step must be a positive number, found 0"),
        (
            SEARCH + "l2 = { uniform = [0, 1], step = 1e-300 }",
            "step must divide the range from 0 to",
        ),
        (
            SEARCH + f"l2 = {{ uniform = [0, 1{'0' * 400}] }}",
            "uniform must be two numbers, the low",
        ),
        (SEARCH + "l2 = { uniform = [-1e308, 1e308] }", "uniform must be two numbers, the lowest"),
        (f"[random]\ncount = 2\nseed = {{ integers = [0, 1{'0' * 400}] }}", "two whole numbers"),
        (SEARCH + "l2 = { uniform = [0, nan] }", "uniform must be two numbers, the lowest and"),
        ("folds = 2\n" + SEARCH + "l2 = [0, 1]", "folds and [search]: expected at most one of"),
        (SEARCH + "upload = ['s3://me:pw@b/x']", "upload s3://b/x: expected a URL without user"),
        ("[grid", "not a TOML file"),
        ("trial = []", "expected at least one [[trial]], found none"),
        ("[train]\nbatch-size = 1\nbatch_size = 2\n[grid]\nseed = [1]", "expected batch_size once"),
        ("[grid]\nbatch-size = [1]\nbatch_size = [2]", "batch_size: expected batch_size once"),
        ("[random]\ncount = 2\nbatch_size = [1]\nbatch-size = [2]", "batch-size: expected batch_"),
        ("[[trial]]\ndata = 's3://me:pw@b/x'", "data s3://b/x: expected a URL without user name"),
        ("[train]\nendpoint_url = 'http://me:pw@h'\n[grid]\nseed = [1]", "endpoint_url http://h: "),
        (
            '[grid]\nseed = [1]\n[train]\ndata = "s3://k:secret@b/x"',
            "data s3://b/x: expected a URL",
        ),
        ('[grid]\nupload = ["s3://k:sec/ret@b/x"]', "upload s3://b/x: expected a URL without user"),
    ],
)
def test_an_unusable_file(read, text, message):
    error = refusal(read, text)
    assert error.startswith(f"{read.path}: ") and message in error and "pw" not in error, error


def test_a_missing_file(tmp_path):
    assert "cannot be read: No such file" in refusal(sweep_file.read, tmp_path / "none.toml")


def test_changed_options():
    old = {"seed": 1, "l2": 0.1, "threads": 1}
    assert sweep_file.changed_options(old, {"seed": 1, "l2": 0.1, "threads": 2}) == []
    assert sweep_file.changed_options(old, {"seed": 2, "epochs": 3}) == ["seed", "l2", "epochs"]
    assert sweep_file.changed_options({"requests": 8}, {"endpoint_url": "http://h"}) == []
    assert set(sweep_file.SPEED) <= set(DECLARED)


NUMBERS = "epochs", "batch_size", "seed"


@pytest.mark.parametrize(
    "text, trials",
    [
        ("folds = 184467440737095516163\n[grid]\nl2 = [0, 0.1]\n", 2 * 184467440737095516163),
        ("folds = 60000\n[grid]\nl2 = [0, 0.1]\n", 120_000),
        ("[random]\ncount = 10000000000000000000\nl2 = [0, 0.1]\n", 10**19),
        (
            "[grid]\n" + "".join(f"{name} = {list(range(1, 101))}\n" for name in NUMBERS),
            10**6,
        ),
    ],
)
def test_too_many_trials_are_refused_before_they_are_listed(read, text, trials):
    message = f"expected at most {sweep_file.MAX_TRIALS} trials, found {trials}"
    assert refusal(read, text).endswith(message)


def test_folds(read):
    """Each combination of options has one trial per fold. A file may contain only `folds`."""
    sweep = read("folds = 3\n[train]\nepochs = 2\n[grid]\nl2 = [0, 0.1]\n")
    assert sweep.folds == 3 and sweep.varied == ["l2", "fold"]
    assert [(trial["l2"], trial["fold"]) for trial in sweep.trials] == [
        (l2, f"{i}/3") for l2 in (0.0, 0.1) for i in (1, 2, 3)
    ]
    sweep = read("folds = 2\n[train]\nepochs = 2\n")
    assert [sweep.options(i) for i in (0, 1)] == [{"epochs": 2, "fold": f"{i}/2"} for i in (1, 2)]
    for text, message in (
        ("folds = 1\n", "folds must be at least 2, found 1"),
        ("folds = 1.5\n", "folds must be a whole number, at least 2, found 1.5"),
        ('folds = 2\n[train]\nfold = "1/2"\n', "folds = 2 sets the option fold, found another"),
        ("folds = 2\n[grid]\n", "[grid] must have lists of values"),
    ):
        assert refusal(read, text).endswith(message) or message in refusal(read, text)
