"""The sub-commands as a user starts them: the content of their JSON, never their speed."""

import importlib.util
import json

import pool
import pytest
import small
from launcher import ROOT, mpirun

from benchmarks import arguments, memory

NO_TORCH = "import sys; sys.modules['torch'] = None; import runpy; "
QUICK = ["--batch-size", 32, "--rounds", 2]
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed (pip install '.[bench]')",
)


def bench(command, *options, path, ranks=None, check=0, env=None):
    """Run a sub-command on the small network; return its Result and its JSON record."""
    words = small.command("benchmarks", command, *options, network=None)
    if command != "kernels":
        words += ["--network", small.SMALL, "--image", "1x12x12"]
    result = mpirun(ranks, *words, "--json", path, env=env, check=check)
    return result, json.loads(path.read_text()) if path.exists() else None


def assert_facts(record, command):
    assert record["command"] == command and record["cpu"] and record["cores"] >= 1
    assert {"python", "numpy", "mpi4py"} <= set(record["versions"])
    assert 0 <= record["busy_before"] <= 1


@pytest.mark.parametrize("ranks", [pytest.param(None, marks=pytest.mark.slow("jobs")), 2])
def test_step(tmp_path, ranks):
    result, record = bench("step", *QUICK, path=tmp_path / "a.json", ranks=ranks)
    assert_facts(record, "step")
    assert (record["ranks"], record["threads"]) == (ranks or 1, 1)
    parts = record["ms"]
    assert set(parts) == {"step", "forward", "backward", "update", "wait"}
    assert all(0 <= p["min"] <= p["median"] <= p["max"] for p in parts.values())
    inside = sum(parts[name]["min"] for name in ("forward", "backward", "update"))
    assert inside <= parts["step"]["max"]
    assert record["images_per_second"] == pytest.approx(32e3 / parts["step"]["median"])
    assert record["peak_mib"] > 0
    if record["arithmetic"] == "NumPy":
        assert record["kernels"] is record["kernel_share"] is None
    else:
        assert record["kernels"] and 0 < record["kernel_share"]
    assert result.stdout.count("images/s") == 1


@pytest.mark.slow("jobs")
def test_step_on_several_numbers_of_ranks(tmp_path):
    _, record = bench("step", *QUICK, "--ranks", "1,2", path=tmp_path / "a.json")
    assert set(record["ms"]) == set(record["efficiency"]) == {"1", "2"}
    assert record["efficiency"]["1"] == 1 and record["efficiency"]["2"] > 0


@pytest.mark.slow("jobs")
def test_kernels(tmp_path):
    """The passes of one network's layers, and shares that fit the rates."""
    words = ["--networks", "digits", "--batch-size", 16, "--rounds", 1]
    result, record = bench("kernels", *words, path=tmp_path / "a.json")
    assert_facts(record, "kernels")
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
    assert "peak of added products" in result.stdout


@pytest.mark.slow("jobs")
def test_fold_in_fresh_processes(tmp_path):
    words = ["--batch-size", 48, "--rounds", 1, "--iterations", 1]
    _, record = bench("fold", *words, path=tmp_path / "a.json")
    assert_facts(record, "fold")
    assert record["processes"] == "fresh"
    for name in ("overhead", "control", "overhead_quartiles", "control_quartiles", "ms"):
        assert set(record[name]) == {"1", "2"}
    for ranks, overhead in record["overhead"].items():
        ms = record["ms"][ranks]
        assert set(ms) == {"fold", "plain", "again"}
        assert overhead == pytest.approx(ms["fold"]["median"] / ms["plain"]["median"] - 1)


@pytest.mark.slow("jobs")
def test_fold_on_the_ranks_that_mpirun_started(tmp_path):
    result, record = bench("fold", *QUICK, path=tmp_path / "a.json", ranks=2)
    assert record["processes"] == "these" and set(record["overhead"]) == {"2"}
    assert 0 <= record["hidden"] <= 1
    assert result.stdout.count("overhead of the fold") == 1


@pytest.mark.slow("jobs")
def test_accuracy(tmp_path):
    _, record = bench("accuracy", "--batch-size", 24, "--seeds", 2, path=tmp_path / "a.json")
    assert_facts(record, "accuracy")
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
def test_accuracy_without_torch(tmp_path):
    path = tmp_path / "a.json"
    code = f"{NO_TORCH}runpy.run_module('benchmarks', run_name='__main__')"
    words = ["accuracy", "--network", small.SMALL, "--image", "1x12x12", "--batch-size", 16]
    result = mpirun(None, "-c", code, *words, "--json", path, check=0)
    assert "PyTorch is not installed (pip install '.[bench]')" in result.stdout
    assert "error" in json.loads(path.read_text())


@pytest.mark.slow("jobs")
def test_against_another_checkout(tmp_path):
    """Against itself: the same weights, and a ratio; a folder without mpidl is refused."""
    words = ["against", ROOT, "--batch-size", 32, "--rounds", 2, "--json", tmp_path / "a.json"]
    result = mpirun(None, *small.command("benchmarks", *words, network=None), check=0)
    assert "the same weights: " in result.stdout
    record = json.loads((tmp_path / "a.json").read_text())
    assert set(record["ratios"]) == {"this", "other", "again"}
    words = small.command("benchmarks", "against", tmp_path, network=None)
    (line,) = small.own_lines(mpirun(None, *words, check=2))
    assert line.endswith("expected a checkout of mpidl, found no mpidl/ in it")


@pytest.mark.slow("jobs")
def test_compare_without_torch():
    """The error is one line that names the extra."""
    code = f"{NO_TORCH}runpy.run_module('benchmarks', run_name='__main__')"
    (line,) = small.own_lines(mpirun(None, "-c", code, "compare", check=2))
    assert line.startswith("mpidl: ") and "pip install '.[bench]'" in line


@needs_torch
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow("jobs")
def test_compare(tmp_path, ranks):
    """The comparison goes on if a variant fails, here for want of a compiler."""
    words = ["--variants", "eager,compile", "--ranks", ranks]
    env = {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    result, record = bench("compare", *QUICK, *words, path=tmp_path / "a.json", env=env)
    assert_facts(record, "compare")
    assert record["best_variant"] == "eager" and set(record["torch_ms"]) == {"eager"}
    assert record["failed"]["compile"] and "compile: failed: " in result.stdout
    assert record["ratio"] == pytest.approx(record["torch_ms"]["eager"] / record["ours_ms"])
    assert record["ratio_min"] <= record["ratio_max"] and "torch" in record["versions"]
    ours, torch = record["losses"]["ours"], record["losses"]["eager"]
    assert len(ours) == len(torch) == 3 and ours[2] < ours[0]
    assert torch == pytest.approx(ours, rel=1e-4)
    assert record["loss_difference"] < 1e-5


@needs_torch
@pytest.mark.slow("jobs")
def test_optimizers(tmp_path):
    path = tmp_path / "a.json"
    words = small.command("benchmarks", "optimizers", "--floats", 1000, "--rounds", 2, network=None)
    result = mpirun(None, *words, "--json", path, check=0)
    record = json.loads(path.read_text())
    assert_facts(record, "optimizers")
    kinds = {f"{name} {how}" for name in ("sgdm", "adam", "adamw") for how in ("fused", "foreach")}
    kinds.add("rmsprop foreach")
    assert set(record["ratio"]) == set(record["ours_ms"]) == set(record["torch_ms"]) == kinds
    for key, ratio in record["ratio"].items():
        ours, torch = record["ours_ms"][key]["median"], record["torch_ms"][key]["median"]
        assert ratio == pytest.approx(torch / ours)
    assert "PyTorch's / ours" in result.stdout


@needs_torch
@pytest.mark.slow("jobs")
def test_compare_memory(tmp_path):
    words = ["--memory", "--variants", "eager"]
    _, record = bench("compare", *QUICK, *words, path=tmp_path / "a.json")
    assert record["ours_mib"] > 0 and record["torch_mib"]["eager"] > 0
    assert record["memory_ratio"] == pytest.approx(
        record["torch_mib"]["eager"] / record["ours_mib"]
    )


@needs_torch
@pytest.mark.slow("jobs")
def test_compare_refuses_uneven_shares():
    words = ["-m", "benchmarks", "compare", "--ranks", 2, "--batch-size", 48]
    (line,) = small.own_lines(mpirun(None, *words, check=2))
    assert "--batch-size must be a multiple of 32 for 2 ranks" in line


def test_refused_under_mpirun():
    for command, text in (("accuracy", "run it without mpirun"), ("kernels", "without mpirun")):
        (line,) = small.own_lines(pool.run(2, "-m", "benchmarks", command, check=2))
        assert text in line


@pytest.mark.slow("jobs")
def test_input(tmp_path):
    """Each kind of file and every comparison, on too few images and rounds to mean anything."""
    words = ["--side", 40, "--images", 20, "--batch-size", 16, "--rounds", 1, "--workers", "1,2"]
    words = small.command("benchmarks", "input", *words, "--network", small.SMALL, network=None)
    path = tmp_path / "a.json"
    result = mpirun(None, *words, "--json", path, check=0)
    record = json.loads(path.read_text())
    assert_facts(record, "input")
    assert set(record["input"]) == {"jpeg", "png", "packed", "arrays"}
    for rows in record["input"].values():
        assert set(rows) == {"1", "2"}
        for row in rows.values():
            assert all(row[name]["median"] > 0 for name in ("pipeline", "step", "both"))
            assert row["share"] > 0
    assert record["epoch"]["ratio"] > 0 and record["decode"]["ratio"] > 0
    assert result.stdout.count("of the slower") == 1


@pytest.mark.slow("jobs")
def test_input_memory():
    """What runs and what it reports, on a set too small to mean anything."""
    options = arguments.parse("input --memory --side 24 --batch-size 16 --ranks 2".split())
    options.gigabytes, options.busy = 5e-4, 0.0
    record = memory.run(options)
    assert_facts(record, "input")
    (row,) = record["mib"].values()
    assert set(row) == {"whole", "cut", "beyond"}
    for name in ("whole", "cut"):
        assert 30 < row[name]["anonymous"] < 2000 and 0 < row[name]["shared"] < 500
    assert abs(row["beyond"]) < 200
