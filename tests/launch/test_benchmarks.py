"""Test benchmarks as a user runs them, and the content of their JSON files, but not the speed."""

import importlib.util
import json
import re

import jobs
import pool
import pytest
from launcher import ROOT, mpirun

from benchmarks import arguments, input_memory

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import runpy; "
WITHOUT_TORCH += "runpy.run_module('benchmarks', run_name='__main__')"
SMALL = ["--network", jobs.SMALL, "--image", "1x12x12"]
QUICK = [*SMALL, "--batch-size", 32, "--rounds", 2]
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed (pip install 'mpidl[bench]')",
)


@pytest.fixture
def bench(tmp_path):
    """Return a function that runs a sub-command and returns its stdout and its JSON record."""

    def run(command, *options, ranks=None, env=None, program=("-m", "benchmarks")):
        path = tmp_path / f"{command}.json"
        words = [*program, command, *options, "--json", path]
        start = pool.run if program == ("-m", "benchmarks") and not env else mpirun
        result = start(ranks, *words, env=env, check=0)
        record = json.loads(path.read_text())
        assert_facts(record, command)
        return result.stdout, record

    return run


def assert_facts(record, command):
    assert record["command"] == command and record["cpu"] and record["cores"] >= 1
    assert {"python", "numpy", "mpi4py"} <= set(record["versions"])
    assert 0 <= record["busy_before"] <= 1


@pytest.mark.slow("jobs")
@pytest.mark.parametrize("ranks", [pytest.param(None, marks=pytest.mark.slow("jobs")), 2])
def test_step(bench, ranks):
    stdout, record = bench("step", *QUICK, ranks=ranks)
    assert (record["ranks"], record["threads"]) == (ranks or 1, 1)
    parts = record["ms"]
    replayed = set() if record["arithmetic"] == "NumPy" else {"replayed step of dl.train"}
    assert set(parts) == {"step", "forward", "backward", "update", "wait"} | replayed
    assert all(0 <= p["min"] <= p["median"] <= p["max"] for p in parts.values())
    inside = sum(parts[name]["min"] for name in ("forward", "backward", "update"))
    assert inside <= parts["step"]["max"]
    assert record["images_per_second"] == pytest.approx(32e3 / parts["step"]["median"])
    assert record["peak_mib"] > 0
    if record["arithmetic"] == "NumPy":
        assert record["kernels"] is record["kernel_share"] is None
    else:
        assert record["kernels"] and 0 < record["kernel_share"]
    assert stdout.count("images/s") == 1


@pytest.mark.slow("jobs")
def test_step_on_several_numbers_of_ranks(bench):
    stdout, record = bench("step", *QUICK, "--ranks", "1,2x1", "--train")
    assert set(record["ms"]) == set(record["efficiency"]) == {"1", "2x1"}
    assert record["efficiency"]["1"] == 1 and record["efficiency"]["2x1"] > 0
    assert set(record["training"]) == {"1", "2x1"} and min(record["training"].values()) > 0
    assert "ms per step of dl.train" in stdout


@pytest.mark.slow("jobs")
def test_kernels(bench):
    """The record has the rates of all passes of a network's layers, and shares of the peak."""
    words = ["--networks", "digits", "--batch-size", 16, "--rounds", 1]
    stdout, record = bench("kernels", *words)
    assert {"forward", "dweight"} <= set(record["gflops"]["digits/conv1"])
    assert {"forward", "dx", "dweight"} <= set(record["gflops"]["digits/conv3"])
    assert {"forward", "dx", "dweight"} <= set(record["gflops"]["digits/dense1"])
    assert {"statistics", "forward", "sums", "dx"} <= set(record["gbs"]["digits/batchnorm2"])
    assert record["copy_gbs"] > 0
    for layer, passes in record["gflops"].items():
        assert set(passes) == set(record["share_of_peak"][layer])
        for name, rate in passes.items():
            share = record["share_of_peak"][layer][name]
            assert (share is None) == (record["peak_gflops"] is None)
            assert rate > 0 and record["ms"][layer][name] > 0 and (share is None or share > 0)
    assert "peak of multiply-adds" in stdout


@pytest.mark.slow("jobs")
def test_fold_in_fresh_processes(bench):
    words = [*SMALL, "--batch-size", 48, "--rounds", 1, "--iterations", 1]
    _, record = bench("fold", *words)
    assert record["processes"] == "fresh"
    for name in ("overhead", "control", "overhead_quartiles", "control_quartiles", "ms"):
        assert set(record[name]) == {"1", "2"}
    for ranks, overhead in record["overhead"].items():
        ms = record["ms"][ranks]
        assert set(ms) == {"fold", "plain", "again"}
        assert overhead == pytest.approx(ms["fold"]["median"] / ms["plain"]["median"] - 1)


@pytest.mark.slow("jobs")
def test_fold_on_the_ranks_that_mpirun_started(bench):
    stdout, record = bench("fold", *QUICK, ranks=2)
    assert record["processes"] == "these" and set(record["overhead"]) == {"2"}
    assert 0 <= record["hidden"] <= 1
    assert stdout.count("overhead of the fold") == 1


@pytest.mark.slow("jobs")
@pytest.mark.parametrize("ranks", [None, 2])
def test_timeline(bench, ranks):
    words = [*SMALL, "--batch-size", 48, "--rounds", 2, "--iterations", 2]
    stdout, record = bench("timeline", *words, ranks=ranks)
    assert set(record["ms"]) == {"off", "on", "again"}
    assert len(record["coverage"]) == (ranks or 1) and 0 < min(record["coverage"]) <= 1
    assert record["spans_per_step"] > 10 and record["span_share"] > 0
    assert "overhead, on against off" in stdout


@pytest.mark.slow("jobs")
def test_interchange(bench):
    stdout, record = bench("interchange", "--networks", "digits")
    figures = record["difference"]["digits"]
    assert figures["bytes"] == 0 and 0 <= figures["import"] <= 1e-5 and figures["export"] <= 1e-5
    assert "the same" in stdout


@pytest.mark.slow("jobs")
def test_accuracy(bench):
    _, record = bench("accuracy", *SMALL, "--batch-size", 24, "--seeds", 2)
    assert record["zero_gradients"] == ["conv1.bias"]
    gradients = {"conv1.weight", "batchnorm1.gamma", "batchnorm1.beta", "dense1.weight"}
    assert gradients | {"relu1", "dense1"} <= set(record["error"]) == set(record["max_error"])
    assert all(0 <= error < 1e-4 for error in record["error"].values())
    if "torch_error" in record:
        assert record["references_agree"] < 1e-10
        for name, ratio in record["ratio"].items():
            assert record["torch_error"][name] > 0 and ratio > 0
        assert record["worst_gradient_ratio"] in record["ratio"].values()


@pytest.mark.slow("jobs")
def test_accuracy_without_torch(bench):
    words = [*SMALL, "--batch-size", 16]
    stdout, record = bench("accuracy", *words, program=("-c", WITHOUT_TORCH))
    assert "PyTorch is not installed (pip install 'mpidl[bench]')" in stdout and "error" in record


@pytest.mark.slow("jobs")
def test_logging(bench):
    stdout, record = bench("logging", "--rounds", 1)
    assert "metrics" in record["ratios"] and record["ranks"] == 1 and "the same weights" in stdout
    assert all(ratio["median"] > 0 for ratio in record["ratios"].values())


@pytest.mark.slow("jobs")
def test_certify(bench):
    words = ["--images", 300, "--side", 8, "--files", 3, "--file-side", 32, "--rounds", 1]
    words += ["--networks", "cifar", "--iterations", 2]
    stdout, record = bench("certify", *words)
    (states,) = record["states"].values()
    assert [len(seconds) for seconds in states["seconds"].values()] == [1, 1]
    assert 0 < states["share"] < 1 and states["ratio"] > 0
    sets = record["manifest"]
    assert list(sets) == ["300 decoded images of 3x8x8", "3 encoded images of 3x32x32"]
    for count, figures in zip((300, 3), sets.values(), strict=True):
        assert figures["bytes"] == len(f"# train {count}\n") + 65 * count
        assert all(len(seconds) == 1 for seconds in figures["seconds"].values())
        assert min(figures["ratios"].values()) > 0
    assert stdout.count("times as long as a reading in order") == 2


@pytest.mark.slow("saves")
def test_saves(bench):
    words = ["--network", "cifar", "--batch-size", 16, "--rounds", 1, "--iterations", 2]
    stdout, record = bench("saves", *words, ranks=2)
    assert record["bytes"] > 1e6 and record["wait_ms"]["min"] > 0 and record["ranks"] == 2
    assert record["processor_ms"]["min"] > 0 and "cost, epoch of ImageNet" in stdout


@pytest.mark.slow("saves")
@pytest.mark.timeout(300)
def test_the_memory_of_a_training_stays_the_same(tmp_path):
    path = tmp_path / "memory.json"
    words = ["--steps", 3000, "--warm-up", 1000, "--json", path]
    result = mpirun(2, "-m", "benchmarks", "memory", *words, check=0)
    assert "flat within 1 % after step 1000" in result.stdout
    record = json.loads(path.read_text())
    assert max(record["growth"]) <= 0.01
    assert [len(samples) for samples in record["bytes"]] == [101, 101]


@pytest.mark.slow("jobs")
def test_against_another_checkout(bench, tmp_path):
    """A comparison of the checkout with itself finds equal weights.

    A folder without mpidl is an error.
    """
    stdout, record = bench("against", ROOT, "--batch-size", 32, "--rounds", 2)
    assert "the same weights: " in stdout
    assert set(record["ratios"]) == {"this", "other", "again"}
    line = jobs.refusal(mpirun(None, "-m", "benchmarks", "against", tmp_path))
    assert line.endswith("expected a checkout of mpidl, found no mpidl/ in it")


@pytest.mark.slow("jobs")
def test_compare_without_torch():
    """Without PyTorch, the error is one line that names the extra to install."""
    line = jobs.refusal(mpirun(None, "-c", WITHOUT_TORCH, "compare"))
    assert "pip install 'mpidl[bench]'" in line


@pytest.mark.slow("jobs")
def test_sweep(bench):
    """All sides of the comparison train the same models with the same weights."""
    words = ["--network", jobs.SMALL, "--models", 2, "--iterations", 2, "--rounds", 2]
    stdout, record = bench("sweep", *words)
    assert set(record["seconds"]) == {"groups of 1", "one after another", "one group"}
    for side, ratio in record["ratios"].items():
        pairs = zip(record["seconds"]["groups of 1"], record["seconds"][side], strict=True)
        assert ratio["median"] == pytest.approx(sum(a / b for a, b in pairs) / 2)
    assert "the same weights of 2 models in 6 sweeps" in stdout


@pytest.mark.slow("jobs")
def test_monitor(bench):
    """The record has the ratio of the times, and the page has received frames."""
    pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'mpidl[monitor]'")
    stdout, record = bench("monitor", "--epochs", 4, "--rounds", 2)
    sides = record["seconds_per_epoch"]
    assert set(sides) == {"with the page", "without"}
    pairs = zip(sides["with the page"], sides["without"], strict=True)
    assert record["ratio"]["median"] == pytest.approx(sum(a / b for a, b in pairs) / 2)
    assert re.search(r"s, [1-9]\d* frames, ", stdout)


@pytest.mark.slow("jobs")
def test_large_batch(bench):
    """The record has the accuracy for each batch size after one epoch.

    With mini-batches of 8192 images, an epoch has only 2 steps, so the accuracy is low.
    """
    words = ["--epochs", 1, "--batch-sizes", "128,8192"]
    stdout, record = bench("large_batch", *words)
    assert record["accuracies"]["128"] > 0.8 > record["accuracies"]["8192"]
    assert "8192" in stdout and "lamb" in stdout


@needs_torch
@pytest.mark.slow("jobs")
def test_time_to_accuracy(bench, pictures):
    """Both sides train for one epoch, after which they have reached an accuracy of 0."""
    words = ["--data", pictures, "--accuracy", 0, "--epochs", 1, "--rounds", 1, "--threads", 1]
    stdout, record = bench("time_to_accuracy", *words, "--variants", "eager,channels_last")
    assert set(record["torch_variants"]["seconds"]) == {"eager", "channels_last"}
    for side in ("ours", "torch"):
        (result,) = record["results"][side]
        assert result["seconds"] > 0 and len(result["accuracies"]) == 1
        assert result["images_per_second"] == pytest.approx(128 / result["seconds"])
    assert f"ratio {record['ratio']:.2f} of the times" in stdout and "torch" in record["versions"]


@needs_torch
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow("jobs")
def test_compare(bench, tmp_path, ranks):
    """The comparison continues if a variant fails, here because there is no compiler."""
    words = ["--variants", "eager,compile", "--ranks", ranks]
    env = {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    stdout, record = bench("compare", *QUICK, *words, env=env)
    assert record["best_variant"] == "eager" and set(record["torch_ms"]) == {"eager"}
    assert record["failed"]["compile"] and "compile: failed: " in stdout
    assert record["ratio"] == pytest.approx(record["torch_ms"]["eager"] / record["ours_ms"])
    assert record["ratio_min"] <= record["ratio_max"] and "torch" in record["versions"]
    ours, torch = record["losses"]["ours"], record["losses"]["eager"]
    assert len(ours) == len(torch) == 3 and ours[2] < ours[0]
    assert torch == pytest.approx(ours, rel=1e-4)
    assert record["loss_difference"] < 1e-5


@needs_torch
@pytest.mark.slow("jobs")
def test_optimizers(bench):
    stdout, record = bench("optimizers", "--floats", 1000, "--rounds", 2)
    names = ("sgdm", "adam", "adamw")
    kinds = {f"{name} {variant}" for name in names for variant in ("fused", "foreach")}
    kinds.add("rmsprop foreach")
    assert set(record["ratio"]) == set(record["ours_ms"]) == set(record["torch_ms"]) == kinds
    for key, ratio in record["ratio"].items():
        ours, torch = record["ours_ms"][key]["median"], record["torch_ms"][key]["median"]
        assert ratio == pytest.approx(torch / ours)
    assert "PyTorch's / ours" in stdout


@needs_torch
@pytest.mark.slow("jobs")
def test_compare_memory(bench):
    _, record = bench("compare", *QUICK, "--memory", "--variants", "eager")
    ours, torch = record["ours_mib"], record["torch_mib"]["eager"]
    assert ours > 0 and torch > 0 and record["memory_ratio"] == pytest.approx(torch / ours)


@needs_torch
@pytest.mark.slow("jobs")
def test_compare_refuses_uneven_shares():
    words = ["-m", "benchmarks", "compare", "--ranks", 2, "--batch-size", 48]
    line = jobs.refusal(mpirun(None, *words))
    assert "--batch-size must be a multiple of 32 for 2 ranks" in line


def test_refused_under_mpirun():
    for command, text in (("accuracy", "run it without mpirun"), ("kernels", "without mpirun")):
        assert text in jobs.refusal(pool.run(2, "-m", "benchmarks", command))


@pytest.mark.slow("jobs")
def test_input(bench):
    """The record has each kind of file and every comparison; the test ignores the times."""
    words = ["--side", 40, "--images", 20, "--batch-size", 16, "--rounds", 1, "--workers", "1,2"]
    stdout, record = bench("input", *words, "--network", jobs.SMALL)
    assert set(record["input"]) == {"jpeg", "png", "packed", "arrays"}
    for rows in record["input"].values():
        assert set(rows) == {"1", "2"}
        for row in rows.values():
            assert all(row[name]["median"] > 0 for name in ("pipeline", "step", "both"))
            assert row["share"] > 0
    assert record["epoch"]["ratio"] > 0 and record["decode"]["ratio"] > 0
    assert stdout.count("both / slower") == 1


@pytest.mark.slow("jobs")
def test_packs(bench):
    """The record has the size of the packed files, and rates, which the test ignores."""
    words = ["--packs", "--side", 40, "--images", 12, "--batch-size", 8, "--rounds", 1]
    _, record = bench("input", *words)
    assert all(0 < size <= 0.3 for size in record["packs"]["size"].values())
    for figures in record["packs"]["1"].values():
        assert figures["rate"]["median"] > 0
    assert record["packs"]["1"]["4 shards"]["processor_rate_ratio"] > 0


@pytest.mark.slow("jobs")
def test_input_memory():
    """The record has the memory for each way of reading, although the set is small."""
    options = arguments.parse("input --memory --side 24 --batch-size 16 --ranks 2".split())
    options.gigabytes, options.busy = 5e-4, 0.0
    record = input_memory.run(options)
    assert_facts(record, "input")
    (row,) = record["mib"].values()
    assert set(row) == {"whole", "cut", "beyond"}
    for name in ("whole", "cut"):
        assert 30 < row[name]["anonymous"] < 2000 and 0 < row[name]["shared"] < 500
    assert abs(row["beyond"]) < 200
