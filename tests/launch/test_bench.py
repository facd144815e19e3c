"""The sub-commands of bench as a user starts them: what their JSON says, never how fast."""

import importlib.util
import json

import pool
import pytest
import small
from launcher import mpirun

from benchmarks import arguments, memory

WITHOUT = "import sys; sys.modules['torch'] = None; import runpy; "
QUICK = ["--batch-size", 32, "--rounds", 2]
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed (pip install '.[bench]')",
)


def bench(what, *options, path, ranks=None, check=0, env=None):
    """The Result of a sub-command on the small network, and what it wrote to --json."""
    words = small.command("benchmarks", what, *options, network=None)
    if what != "kernels":
        words += ["--network", small.SMALL, "--image", "1x12x12"]
    result = mpirun(ranks, *words, "--json", path, env=env, check=check)
    return result, json.loads(path.read_text()) if path.exists() else None


def assert_facts(found, what):
    assert found["command"] == what and found["cpu"] and found["cores"] >= 1
    assert {"python", "numpy", "mpi4py"} <= set(found["versions"])
    assert 0 <= found["busy_before"] <= 1


@pytest.mark.parametrize("ranks", [pytest.param(None, marks=pytest.mark.slow("jobs")), 2])
def test_step(tmp_path, ranks):
    result, found = bench("step", *QUICK, path=tmp_path / "a.json", ranks=ranks)
    assert_facts(found, "step")
    assert (found["ranks"], found["threads"]) == (ranks or 1, 1)
    parts = found["ms"]
    assert set(parts) == {"step", "forward", "backward", "update", "wait"}
    assert all(0 <= p["min"] <= p["median"] <= p["max"] for p in parts.values())
    inside = sum(parts[name]["min"] for name in ("forward", "backward", "update"))
    assert inside <= parts["step"]["max"]
    assert found["images_per_second"] == pytest.approx(32e3 / parts["step"]["median"])
    assert found["peak_mib"] > 0
    if found["arithmetic"] == "NumPy":
        assert found["kernels"] is found["kernel_share"] is None
    else:
        assert found["kernels"] and 0 < found["kernel_share"]
    assert result.stdout.count("images/s") == 1


@pytest.mark.slow("jobs")
def test_step_on_several_numbers_of_ranks(tmp_path):
    _, found = bench("step", *QUICK, "--ranks", "1,2", path=tmp_path / "a.json")
    assert set(found["ms"]) == set(found["efficiency"]) == {"1", "2"}
    assert found["efficiency"]["1"] == 1 and found["efficiency"]["2"] > 0


def test_kernels(tmp_path):
    """The layers of one network: kinds of passes, and shares that fit the rates."""
    words = ["--networks", "digits", "--batch-size", 16, "--rounds", 1]
    result, found = bench("kernels", *words, path=tmp_path / "a.json")
    assert_facts(found, "kernels")
    assert {"forward", "dweight"} <= set(found["gflops"]["digits/conv1"])
    assert {"forward", "dx", "dweight"} <= set(found["gflops"]["digits/conv3"])
    assert {"forward", "dx", "dweight"} <= set(found["gflops"]["digits/dense1"])
    assert {"statistics", "forward", "sums", "dx"} <= set(found["gbs"]["digits/batchnorm2"])
    assert found["copy_gbs"] > 0
    for layer, passes in found["gflops"].items():
        assert set(passes) == set(found["share_of_peak"][layer])
        for name, rate in passes.items():
            share = found["share_of_peak"][layer][name]
            assert (share is None) == (found["peak_gflops"] is None)
            assert rate > 0 and found["ms"][layer][name] > 0 and (share is None or share > 0)
    assert "peak of added products" in result.stdout


@pytest.mark.slow("jobs")
def test_fold_in_fresh_processes(tmp_path):
    words = ["--batch-size", 48, "--rounds", 1, "--iterations", 1]
    _, found = bench("fold", *words, path=tmp_path / "a.json")
    assert_facts(found, "fold")
    assert found["processes"] == "fresh"
    for name in ("overhead", "control", "overhead_quartiles", "control_quartiles", "ms"):
        assert set(found[name]) == {"1", "2"}
    for ranks, overhead in found["overhead"].items():
        ms = found["ms"][ranks]
        assert set(ms) == {"fold", "plain", "again"}
        assert overhead == pytest.approx(ms["fold"]["median"] / ms["plain"]["median"] - 1)


@pytest.mark.slow("jobs")
def test_fold_on_the_ranks_that_mpirun_started(tmp_path):
    result, found = bench("fold", *QUICK, path=tmp_path / "a.json", ranks=2)
    assert found["processes"] == "these" and set(found["overhead"]) == {"2"}
    assert 0 <= found["hidden"] <= 1
    assert result.stdout.count("overhead of the fold") == 1


@pytest.mark.slow("jobs")
def test_accuracy(tmp_path):
    _, found = bench("accuracy", "--batch-size", 24, "--seeds", 2, path=tmp_path / "a.json")
    assert_facts(found, "accuracy")
    assert found["zero_gradients"] == ["conv1.bias"]
    gradients = {"conv1.weight", "batchnorm1.gamma", "batchnorm1.beta", "dense1.weight"}
    assert gradients | {"relu1", "dense1"} <= set(found["error"]) == set(found["max_error"])
    assert all(0 <= error < 1e-4 for error in found["error"].values())
    if "torch_error" in found:
        assert found["references_agree"] < 1e-10
        for name, ratio in found["ratio"].items():
            assert found["torch_error"][name] > 0 and ratio > 0
        assert found["worst_gradient_ratio"] in found["ratio"].values()


def test_accuracy_without_torch(tmp_path):
    path = tmp_path / "a.json"
    code = f"{WITHOUT}runpy.run_module('benchmarks', run_name='__main__')"
    words = ["accuracy", "--network", small.SMALL, "--image", "1x12x12", "--batch-size", 16]
    result = mpirun(None, "-c", code, *words, "--json", path, check=0)
    assert "PyTorch is not installed (pip install '.[bench]')" in result.stdout
    assert "error" in json.loads(path.read_text())


@pytest.mark.slow("jobs")
def test_compare_without_torch():
    """One line that names the extra."""
    code = f"{WITHOUT}runpy.run_module('benchmarks', run_name='__main__')"
    (line,) = small.own_lines(mpirun(None, "-c", code, "compare", check=2))
    assert line.startswith("mpidl: ") and "pip install '.[bench]'" in line


@needs_torch
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.slow("jobs")
def test_compare(tmp_path, ranks):
    """Also where a variant fails: here the compiler is missing."""
    words = ["--variants", "eager,compile", "--ranks", ranks]
    env = {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "cache"}
    result, found = bench("compare", *QUICK, *words, path=tmp_path / "a.json", env=env)
    assert_facts(found, "compare")
    assert found["best_variant"] == "eager" and set(found["torch_ms"]) == {"eager"}
    assert found["failed"]["compile"] and "compile: failed: " in result.stdout
    assert found["ratio"] == pytest.approx(found["torch_ms"]["eager"] / found["ours_ms"])
    assert found["ratio_min"] <= found["ratio_max"] and "torch" in found["versions"]
    ours, theirs = found["losses"]["ours"], found["losses"]["eager"]
    assert len(ours) == len(theirs) == 3 and ours[2] < ours[0]
    assert theirs == pytest.approx(ours, rel=1e-4)
    assert found["loss_difference"] < 1e-5


@needs_torch
@pytest.mark.slow("jobs")
def test_optimizers(tmp_path):
    path = tmp_path / "a.json"
    words = small.command("benchmarks", "optimizers", "--floats", 1000, "--rounds", 2, network=None)
    result = mpirun(None, *words, "--json", path, check=0)
    found = json.loads(path.read_text())
    assert_facts(found, "optimizers")
    kinds = {"sgdm fused", "sgdm foreach", "adam fused", "adam foreach", "rmsprop foreach"}
    assert set(found["ratio"]) == set(found["ours_ms"]) == set(found["torch_ms"]) == kinds
    for key, ratio in found["ratio"].items():
        ours, theirs = found["ours_ms"][key]["median"], found["torch_ms"][key]["median"]
        assert ratio == pytest.approx(theirs / ours)
    assert "PyTorch's / ours" in result.stdout


@needs_torch
@pytest.mark.slow("jobs")
def test_compare_memory(tmp_path):
    words = ["--memory", "--variants", "eager"]
    _, found = bench("compare", *QUICK, *words, path=tmp_path / "a.json")
    assert found["ours_mib"] > 0 and found["torch_mib"]["eager"] > 0
    assert found["memory_ratio"] == pytest.approx(found["torch_mib"]["eager"] / found["ours_mib"])


@needs_torch
@pytest.mark.slow("jobs")
def test_compare_refuses_uneven_shares():
    words = ["-m", "benchmarks", "compare", "--ranks", 2, "--batch-size", 48]
    (line,) = small.own_lines(mpirun(None, *words, check=2))
    assert "--batch-size must be a multiple of 32 for 2 ranks" in line


def test_refused_under_mpirun():
    for what, text in (("accuracy", "run it without mpirun"), ("kernels", "without mpirun")):
        (line,) = small.own_lines(pool.run(2, "-m", "benchmarks", what, check=2))
        assert text in line


@pytest.mark.slow("jobs")
def test_input(tmp_path):
    """Each kind of file, and what is compared; on images and rounds too few to mean anything."""
    words = ["--side", 40, "--images", 20, "--batch-size", 16, "--rounds", 1, "--workers", "1,2"]
    words = small.command("benchmarks", "input", *words, "--network", small.SMALL, network=None)
    path = tmp_path / "a.json"
    result = mpirun(None, *words, "--json", path, check=0)
    found = json.loads(path.read_text())
    assert_facts(found, "input")
    assert set(found["input"]) == {"jpeg", "png", "packed", "arrays"}
    for rows in found["input"].values():
        assert set(rows) == {"1", "2"}
        for row in rows.values():
            assert all(row[name]["median"] > 0 for name in ("pipeline", "step", "both"))
            assert row["share"] > 0
    assert found["epoch"]["ratio"] > 0 and found["decode"]["ratio"] > 0
    assert result.stdout.count("of the slower") == 1


@pytest.mark.slow("jobs")
def test_input_memory():
    """On a set too small to mean anything: what is run, and what is told."""
    chosen = arguments.parse("input --memory --side 24 --batch-size 16 --ranks 2".split())
    chosen.gigabytes, chosen.busy = 5e-4, 0.0
    found = memory.run(chosen)
    assert_facts(found, "input")
    (row,) = found["mib"].values()
    assert set(row) == {"whole", "cut", "beyond"}
    for name in ("whole", "cut"):
        assert 30 < row[name]["anonymous"] < 2000 and 0 < row[name]["shared"] < 500
    assert abs(row["beyond"]) < 200
