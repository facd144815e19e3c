"""Test the benchmarks' arguments, comparisons, counts and reports, but not their times."""

import json
import os
import re

import numpy as np
import pytest
from single_rank import SingleRank

from benchmarks import (
    arguments,
    compare,
    fold,
    kernels,
    machine,
    optimizers,
    passes,
    report,
    turns,
)
from benchmarks import main as compare_main
from mpidl.errors import Fault, UserError


def refused(line):
    with pytest.raises(UserError) as error:
        arguments.parse(line.split())
    return str(error.value)


def test_arguments():
    options = arguments.parse("fold --rounds 2 --batch-size 64 --ranks 1,2".split())
    assert (options.command, options.rounds, options.batch_size) == ("fold", 2, 64)
    assert options.ranks == [1, 2]
    options = arguments.parse("compare --image 3x8x8 --variants eager,compile".split())
    assert (options.image, options.variants) == ([3, 8, 8], ["eager", "compile"])
    assert options.libraries == []
    assert (options.threads, options.ranks, options.seed, options.json) == (1, 1, 0, None)
    assert "--rounds must be" in refused("fold --rounds 0")
    assert "did you mean channels_last?" in refused("compare --variants eager,chanels_last")
    assert "--image must be CxHxW" in refused("step --image 28x28")
    assert "--held-to must be among avx2" in refused("compare --held-to sse")
    assert "choose from 'fp32', 'bf16'" in refused("compare --precision tf32")
    assert "unknown option --ranks" in refused("kernels --ranks 2")


def test_predictions_are_compared_on_one_rank(monkeypatch, capsys):
    options = arguments.parse("compare --predict --network resnet18 --ranks 2".split())
    monkeypatch.setattr(compare.torch_step, "require", lambda command: None)
    with pytest.raises(UserError, match="--predict: expected one rank"):
        compare.main(options)
    options = arguments.parse(["compare", "--predict"])
    times = {"eager": [(2.0, 6.0)] * 3, "onnxruntime": [(2.0, 5.0)] * 3}
    figures = compare.evaluate(options, times, {"ours": [1.0], "eager": [1.0], "onnxruntime": [1]})
    assert (figures["best_variant"], figures["ratio"]) == ("onnxruntime", 2.5)
    assert "; ours: 64.0 images/s" in capsys.readouterr().out


@pytest.mark.slow("jobs")
def test_predictions_next_to_onnxruntime(capsys, tmp_path):
    """All sides must compute the same loss; PyTorch is included if it is installed."""
    options = "compare --predict --batch-size 16 --rounds 1 --variants eager"
    path = tmp_path / "figures.json"
    compare_main([*options.split(), "--json", str(path)])
    figures = json.loads(path.read_text())
    assert figures["predict"] and figures["loss_difference"] < 1e-5
    assert "onnxruntime" in figures["ms_spread"]


def test_ranks_get_cores_in_turn(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7})
    assert machine.cores_of(2, 2) == [[4, 5], [6, 7]]
    assert machine.cores_of(3, 2) == [[4, 5], [6, 7], [4, 5]]


def test_a_json_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    report.prepare_json(None)
    report.prepare_json(str(tmp_path / "new.json"))
    with pytest.raises(UserError, match="--json"):
        report.prepare_json(str(tmp_path / "missing" / "new.json"))
    report.write_json(str(tmp_path / "new.json"), {"a": np.float32(0.5), "b": np.arange(2)})
    assert json.loads((tmp_path / "new.json").read_text()) == {"a": 0.5, "b": [0, 1]}


def test_the_number_of_steps_in_a_turn():
    assert [turns.steps_for(s) for s in (10.0, 0.1, 0.05, 1e-6, 0.0)] == [1, 2, 5, 50, 50]


def test_the_ratio_is_the_fastest_variant_over_ours(capsys):
    options = arguments.parse(["compare"])
    times = {"eager": [(2.0, 6.0), (2.2, 6.6), (1.8, 9.0)], "compile": [(2.0, 5.0)] * 3}
    losses = {"ours": [2.0, 1.0], "eager": [2.0, 1.0], "compile": [2.002, 1.5]}
    figures = compare.evaluate(options, times, losses)
    assert (figures["best_variant"], figures["ours_ms"]) == ("compile", 2000.0)
    assert figures["torch_ms"] == {"eager": 6600.0, "compile": 5000.0} and figures["ratio"] == 2.5
    assert figures["loss_difference"] == pytest.approx(1e-3)
    printed = capsys.readouterr().out
    assert "ratio 2.50" in printed and "compile in fp32 against ours in fp32" in printed
    assert figures["precision"] == "fp32"


def test_the_precision_of_a_ratio(capsys):
    """PyTorch's variants have the precision of ours; libraries and mpidl-fp32 stay in float32."""
    line = "compare --precision bf16 --variants channels_last --with jax,mpidl-fp32"
    options = arguments.parse(line.split())
    assert arguments.parse(["compare"]).precision == "fp32"
    pairs = {"channels_last": (2.0, 3.0), "jax": (2.0, 2.5), "mpidl-fp32": (2.0, 2.2)}
    losses = {"ours": [2.0, 1.0], **{name: [2.02, 1.0] for name in pairs}}
    times = {name: [pair] * 3 for name, pair in pairs.items()}
    versions = {"channels_last": "2.13.0", "jax": "", "mpidl-fp32": ""}
    figures = compare.evaluate(options, times, losses, versions)
    assert (figures["best_variant"], figures["ratio"]) == ("channels_last", 1.5)
    assert (figures["precision"], figures["ratio_by_version"]) == ("bf16", {"2.13.0": 1.5})
    printed = capsys.readouterr().out
    assert "channels_last in bf16 against ours in bf16" in printed and "jax (fp32)" in printed
    options.predict = True
    times["onnxruntime"] = [(2.0, 2.4)] * 3
    options.libraries.append("onnxruntime")
    figures = compare.evaluate(options, times, losses | {"onnxruntime": [2.0]}, versions)
    assert (figures["best_variant"], figures["ratio"]) == ("onnxruntime", 1.2)
    assert "onnxruntime in fp32 against ours in bf16" in capsys.readouterr().out
    options.predict, only_ours = False, {"mpidl-fp32": times["mpidl-fp32"]}
    assert compare.evaluate(options, only_ours, losses)["best_variant"] == "mpidl-fp32"


def test_our_float32_is_a_side_only_beside_another_precision(monkeypatch):
    options = arguments.parse(["compare", "--with", "mpidl-fp32"])
    with pytest.raises(UserError, match="--with mpidl-fp32: expected --precision bf16, found fp32"):
        compare.main(options)
    monkeypatch.setattr(compare.torch_versions, "find", lambda words: [])
    tasks = []
    monkeypatch.setattr(turns, "Side", lambda name, commands, *rest: tasks.append(commands[0][-1]))
    options = arguments.parse("compare --precision bf16 --with mpidl-fp32".split())
    compare.our_side(options, "folder")
    compare.other_sides(options)["mpidl-fp32"].start("folder")
    assert [json.loads(task)["precision"] for task in tasks] == ["bf16", "fp32"]


class MemorySide:
    """A side whose step takes `mib` MiB of memory."""

    def __init__(self, mib):
        self.mib = mib

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def ask(self, action, count=0):
        return [{"describe": {"versions": {}}, "memory": self.mib * 2**20}.get(action)]


def test_memory_in_both_precisions(monkeypatch, capsys):
    options = arguments.parse("compare --memory --precision bf16 --with mpidl-fp32".split())
    options.busy = 0.0
    monkeypatch.setattr(compare, "our_side", lambda options, folder: MemorySide(60))
    monkeypatch.setattr(compare, "check_onednn", lambda *arguments: {})
    sides = {
        name: compare.OtherSide(version, lambda folder, mib=mib: MemorySide(mib))
        for name, version, mib in (("eager", "2.13.0", 90), ("mpidl-fp32", "", 80))
    }
    record = compare.compare_memory(options, sides, "folder")
    assert (record["memory_ratio"], record["least_variant"]) == (1.5, "eager")
    assert (record["ours_mib"], record["fp32_mib"], record["precision"]) == (60, 80, "bf16")
    assert "ours in bf16 / ours in fp32 0.75" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("precision", "side", "difference", "is_same"),
    [
        ("fp32", "channels_last", 9e-5, True),
        ("fp32", "channels_last", 2e-4, False),
        ("fp32", "channels_last 2.12.1", 2e-4, False),
        ("bf16", "channels_last", 1e-2, True),
        ("bf16", "channels_last 2.12.1", 3e-2, True),  # both sides round
        ("bf16", "compile+channels_last", 5e-2, False),
        ("bf16", "jax", 1e-2, True),
        ("bf16", "jax", 3e-2, False),  # only ours rounds
        ("bf16", "channels_last", float("nan"), False),
    ],
)
def test_losses_of_the_same_computation(monkeypatch, precision, side, difference, is_same):
    record = {"loss_differences": {side: difference}}
    monkeypatch.setattr(compare.torch_step, "require", lambda command: None)
    monkeypatch.setattr(compare, "other_sides", lambda options: {})
    monkeypatch.setattr(compare, "compare_time", lambda *arguments: record)
    options = arguments.parse(["compare", "--precision", precision, "--with", "jax"])
    if is_same:
        assert compare.main(options) is record
    else:
        with pytest.raises(Fault, match=re.escape(f"ours and {side} compute different results")):
            compare.main(options)


def test_the_overhead_is_paired_by_rounds():
    times = {"fold": [1.1, 2.2, 3.0], "plain": [1.0, 2.0, 3.0], "again": [1.1, 1.1, 3.3]}
    figures = fold._figures({2: {kind: np.array(values) for kind, values in times.items()}})
    assert figures["overhead"] == {"2": pytest.approx(0.1)}
    assert figures["control"] == {"2": pytest.approx(0.0)}


def test_optimizers_are_compared_only_if_their_steps_agree():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    kind, name, options, implementations = optimizers.PAIRS["adam"]
    for implementation in implementations:
        side = optimizers.torch_optimizer(name, options | {implementation: True}, 99)
        times = optimizers.compare(optimizers.our_optimizer(kind(), 99), side, 2)
        assert [len(t) for t in times] == [2, 2]
    with pytest.raises(Fault, match="after 3 steps the weights differ by"):
        optimizers.compare(optimizers.our_optimizer(kind(0.01), 99), side, 2)


def test_operations_and_bytes_of_kernels():
    options = arguments.parse(["kernels", "--batch-size", "32"])
    cases = {(c.layer, c.name): c for c in passes.cases("digits", options)}
    pixels = 24 * 24 * 32
    assert cases["digits/conv1", "forward"].flops == 2 * 25 * 20 * pixels
    assert cases["digits/conv2", "dx"].flops == 2 * 9 * 20 * 20 * pixels
    assert cases["digits/conv2", "dweight"].flops == 2 * 9 * 20 * 20 * pixels
    assert ("digits/conv1", "dx") not in cases  # training computes no dx of the first layer
    assert cases["digits/dense1", "forward"].flops == 2 * 11520 * 10 * 32
    assert cases["digits/dense1", "backward"].flops == 4 * 11520 * 10 * 32
    assert cases["digits/relu1", "forward"].bytes == 2 * 4 * 20 * pixels
    assert cases["digits/conv2", "dx"].shape == cases["digits/conv3", "dx"].shape
    weight = 4 * 9 * 20 * 20
    assert cases["digits/conv2", "dx"].bytes == 2 * 4 * 20 * pixels + weight
    assert cases["digits/conv2", "fused backward"].bytes == 2 * cases["digits/conv2", "dx"].bytes
    for case in cases.values():
        assert case.bytes > 0 and case.products <= case.flops
        case.run()
    shapes = {c.layer for c in passes.cases("shapes", options)}
    assert shapes == {"20 at 24x24", "32 at 32x32", "64 at 16x16", "128 at 8x8"}


@pytest.mark.slow("jobs")
def test_the_large_layer_beside_blas():
    """BLAS computes the same product as the case, for all images."""
    options = arguments.parse(["kernels", "--batch-size", "64"])
    cases = list(passes.cases("dense", options))
    assert [case.name for case in cases] == ["forward", "dx", "dweight"]
    for case in cases:
        assert (case.layer, case.flops) == ("9216 to 4096", 2 * 9216 * 4096 * 32)
        ours, product = case.run(), case.sgemm()
        if case.name == "dweight":
            ours = SingleRank().gplus(ours)
        else:
            ours = ours.swapaxes(0, 1).reshape(product.shape)
        assert np.abs(ours - product).max() < 1e-5 * np.abs(product).max()
    both = [case._replace(run=lambda: None) for case in cases]
    figures = kernels.measure(both[0], kernels.Yardsticks(1), 3)
    assert set(figures) == {"ms", "gflops", "share_of_peak", "sgemm_ratio"}
    assert figures["sgemm_ratio"] < 0.01  # an empty call takes less time than a matrix product
    row = dict(zip(kernels.HEAD, kernels.table_row(both[0], figures), strict=True))
    assert row["time / sgemm"] == "0.00" and row["GB/s"] == ""
    options.threads = 2
    assert all(case.sgemm is None for case in passes.cases("dense", options))


def test_a_case_is_measured_against_its_yardstick():
    options = arguments.parse(["kernels", "--batch-size", "16"])
    yardsticks = kernels.Yardsticks(1)
    case = next(passes.cases("digits", options))
    figures = kernels.measure(case._replace(run=lambda: None), yardsticks, 3)
    assert set(figures) == {"ms", "gflops", "share_of_peak"}
    peak, copy = yardsticks.medians()
    assert copy is None and (peak is None) == (yardsticks.kernels is None)
