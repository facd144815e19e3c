"""Test the check and the timing of GPUs on an emulated GPU: errors, counts and reports."""

import json
import math
import sys

import numpy as np
import pytest
from emulator import compiler, opened

from benchmarks import arguments, mpidl_step, subject
from benchmarks.gpu import (
    check,
    compiling,
    floors,
    identity,
    ours,
    parity,
    sanitizer,
    speed,
    stage,
    tables,
    theirs,
    training,
)
from benchmarks.report import Report, load, markdown
from benchmarks.turns import Lost
from mpidl.backends.gpu import launching
from mpidl.backends.gpu.discovery import Gpu, Visible
from mpidl.backends.gpu.sums import Counts
from mpidl.comm import World
from mpidl.errors import UserError
from mpidl.nn import zoo

IMAGE = (1, 9, 9)
needs_compiler = pytest.mark.skipif(compiler.find() is None, reason="no g++ for the emulator")


@pytest.fixture
def gpu():
    """Return a world of one rank on an emulated GPU."""
    world = World(threads=1)
    with opened() as device:
        world.device, world.counts = device, Counts()
        yield world


def visible_gpus(*names):
    gpus = tuple(Gpu(i, str(i), name, "sm_90", 132, 1 << 37) for i, name in enumerate(names))
    return lambda: Visible(gpus, "" if gpus else "no NVIDIA driver")


# lower bounds of a step


def test_the_floors_of_the_zoo():
    """A step's GFLOP and its lower time bounds on an H200 equal known values."""
    digits = floors.work(zoo.digits())
    products = 24 * 24 * 20 * (25 + 180 + 180) + 11520 * 10
    assert digits.products == products and digits.first == 24 * 24 * 20 * 25
    assert digits.outputs == 3 * 24 * 24 * 20 and digits.learnables == 123_090
    assert digits.flop == 2 * (3 * products - 24 * 24 * 20 * 25)
    rate = floors.rates("NVIDIA H200")
    exact = floors.milliseconds(digits, 128, rate, "fp32")
    assert exact["products"] == pytest.approx(0.0207, rel=1e-2)  # 3 TF32 products per fp32 product
    assert exact["bytes fused"] == pytest.approx(0.0370, rel=1e-2)
    assert exact["bytes apart"] == pytest.approx(0.0535, rel=1e-2)
    assert exact["floor"] == exact["bytes fused"]
    cifar = floors.milliseconds(floors.work(zoo.cifar()), 1024, rate, "bf16")
    assert cifar["products"] == pytest.approx(0.739, rel=1e-2)
    assert cifar["bytes fused"] == pytest.approx(0.983, rel=1e-2)


def test_an_unknown_gpu_has_measured_rates():
    measured = floors.Rates(1e12, 2e12, 3e12, 4e12, "measured")
    assert floors.rates("NVIDIA H200 NVL", measured).source != "measured"
    assert floors.rates("Some GPU", measured) is measured and floors.rates("Some GPU") is None


# parity


@pytest.mark.slow("gpu")
@needs_compiler
def test_parity_with_float64_passes_and_finds_an_error(gpu, monkeypatch):
    report = Report("parity")
    parity.check_all(report, {"small": zoo.digits((1, 7, 7))}, count=20)
    assert not report.failed and len(report.record["checks"]) == len(parity.KINDS)
    functions = {row[2] for row in report.record["tables"][0]["rows"]}
    assert {"conv2d", "conv2d_backward", "dense_backward", "moments", "optimizer_step"} <= functions
    right = parity.reference.conv2d

    def with_error(*arguments):
        return right(*arguments) * (1 + 1e-5)

    monkeypatch.setattr(parity.reference, "conv2d", with_error)
    second = Report("parity")
    parity.check_all(second, {"small": zoo.digits((1, 7, 7))}, parity.KINDS[:1], count=20)
    assert second.failed == ["ops of small, fp32"]
    assert "conv2d" in second.record["checks"][0]["found"]


def test_the_relative_error_of_nan_is_infinite():
    assert parity.relative(np.array([1.0, np.nan]), np.ones(2)) == math.inf
    assert parity.relative(np.zeros(3), np.zeros(3)) == 0


@needs_compiler
@pytest.mark.slow("gpu")
def test_the_stage_that_the_sanitizer_runs(gpu, capsys):
    assert stage.small(gpu, parity.KINDS[:1]) == 0
    assert "ops of small, fp32" in capsys.readouterr().out


@needs_compiler
def test_the_units_of_a_step_are_found_without_computing(gpu):
    report, compiled = Report("machine"), []
    device = gpu.device
    units = compiling.units_of(gpu, "digits", 16, "tf32", image=IMAGE)
    assert gpu.device is launching.device() is device
    assert {"conv_gemm", "conv_dweight", "dense", "optimizer"} <= {u.family for u in units}
    assert ("PRECISION", 1) in units[3].defines + units[4].defines

    def compile_all(units, architecture, compile):
        compiled.extend(units)
        return ["fold: no"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "compile_all", compile_all)
        compiling.check_all(report, gpu, {"digits": (16,)})
    assert len(set(compiled)) == len(compiled) and report.failed == ["kernels compile"]
    assert {"pool", "conv_direct"} <= {unit.family for unit in compiled}  # other networks' kernels


# training


def sets():
    return training.small_set(IMAGE, 50), training.small_set(IMAGE, 20)


@needs_compiler
@pytest.mark.slow("gpu")
def test_training_is_compared_with_the_cpu(gpu, monkeypatch):
    monkeypatch.setitem(zoo.RECIPES["digits"], "batch_size", 16)
    cpu = World(threads=1)
    cpu.device_request = "cpu", None
    report = Report("training")
    training.parity(report, cpu, gpu, sets(), epochs=1)
    checks = {c["what"]: c for c in report.record["checks"]}
    assert len(checks) == 5
    failed = [name for name in report.failed if not name.startswith("accuracy")]
    assert failed == []
    assert "4 iterations" in checks["losses at rate 1e-05: GPU and CPU"]["found"]
    assert report.failed == ["accuracy after 1 epochs"]  # random images teach nothing


def test_losses_that_differ_fail():
    report = Report("training")
    training.compare(report, "here", np.array([2.0, 1.001]), np.array([2.0, 1.0]), 1e-4)
    training.compare(report, "there", np.array([2.0]), np.array([2.0, 1.0]), 1.0)
    assert report.failed == ["here", "there"]
    assert "1.0e-03, in iteration 2" in report.record["checks"][0]["found"]


class Runs:
    """Runner for `identity` that trains on an emulated GPU, in this process."""

    def __init__(self, world, spoil=None):
        self.world, self.spoil, self.started = world, spoil, []

    def __call__(self, name, ranks, options, out=None, resume=False):
        self.started.append(name)
        if name == self.spoil:
            raise UserError("it broke")
        options = {k: v for k, v in options.items() if k != "device"} | {"batch_size": 16}
        train_set = sets()[0]
        run = training.train(self.world, training.network(train_set), train_set, options)
        return {"losses": run.losses, "sha256": run.sha256}


@needs_compiler
@pytest.mark.slow("gpu")
def test_runs_are_compared_byte_for_byte(gpu):
    report, start = Report("identity"), Runs(gpu)
    identity.check_all(report, start, ranks=(), checkpoints=False, iterations=5)
    assert report.failed == [] and len(report.record["checks"]) == 4
    assert start.started == ["once", "again", "without graphs", "tf32", "tf32, again"]


def fake_run(name, ranks, options, out=None, resume=False):
    if name == "4 ranks":
        raise UserError("it broke")
    losses = [3.0, 2.0, 1.0]
    if out is not None:
        losses = losses[1:] if resume else losses[:1]
    if name == "2 ranks":
        losses = [3.0, 2.5, 1.0]
    kind = "other" if options.get("precision") == "tf32" or name == "2 ranks" else "same"
    return {"losses": losses, "sha256": kind}


def test_other_bytes_and_broken_runs_fail():
    report = Report("identity")
    identity.check_all(report, fake_run, iterations=3, stop=1)
    assert report.failed == ["2 ranks", "4 ranks"]
    text = {c["what"]: c["found"] for c in report.record["checks"]}
    assert "losses differ from iteration 2" in text["2 ranks"] and text["4 ranks"] == "it broke"
    assert text["2 rank(s), resumed on 1 after iteration 1"] == "the same weights and losses"


def test_the_digit_set_is_kept_in_a_file(tmp_path, monkeypatch):
    images = np.zeros((50, 4, 4), np.uint8), np.arange(50) % 10
    monkeypatch.setattr(
        "importlib.import_module", lambda name: type("", (), {"draw": lambda: images})
    )
    path = str(tmp_path / "digits.npz")
    for _ in range(2):
        train_set, test_set = training.digits(path)
        monkeypatch.undo()  # the second call reads the file
    assert (len(train_set), len(test_set)) == (40, 10) or len(train_set) + len(test_set) == 50


# timing


@needs_compiler
@pytest.mark.slow("gpu")
def test_a_step_and_its_kernels(gpu):
    step = mpidl_step.RecordedStep(gpu, "digits", 20, image=IMAGE)
    losses = step.losses(3)
    assert losses[0] == pytest.approx(math.log(10), abs=1.5) and losses[2] != losses[0]
    assert step.run(2) > 0
    rows = ours.kernel_times(step, 2, delay_bytes=256)
    assert [row["ms"] for row in rows] == sorted((row["ms"] for row in rows), reverse=True)
    assert sum(row["times"] for row in rows) == len(step.program.launches())
    flop = sum(row["flop"] for row in rows)
    work = floors.work(subject.network("digits", IMAGE))
    images = 32  # two blocks, because kernels also compute unused images
    assert flop == images * work.flop
    assert all(row["bytes"] > 0 for row in rows)
    assert step.losses(1)[0] < losses[0] + 1  # training continues as before
    assert ours.bytes_per_second(gpu.device, 1 << 10, 2) > 0


def needs_torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


class LocalSides(speed.Sides):
    """Sides that run in this process: mpidl on the emulated GPU, PyTorch on the CPU."""

    def __init__(self, world, seconds):
        self.world, self.seconds, self.steps, self.torch = world, seconds, {}, True

    def left(self):
        return self.seconds

    def ask(self, kind, action, *rest):
        if action == "copy_rate":
            return 1e12
        if action == "product_rates":
            return {"fp32": 1e12, "tf32": 4e12, "bf16": 8e12}
        if action == "kernels":
            return ours.kernel_times(self.steps[kind, rest[0]], 1, delay_bytes=256)
        if action == "run":
            return self.steps[kind, rest[0]].run(1)
        name, options = rest
        if kind == "ours":
            step = self.steps[kind, name] = mpidl_step.RecordedStep(self.world, **options)
            return step.losses(3)
        if not {"graph", "compile"}.isdisjoint(options["variant"].split("+")):
            raise Lost(kind, "no graphs here")
        step = self.steps[kind, name] = theirs.GpuStep(**options, device="cpu")
        return step.first_losses

    def drop(self):
        self.steps.clear()


@needs_compiler
def test_the_timing_from_end_to_end(gpu):
    needs_torch()
    report, result = Report("timing"), speed.Timing("digits", 16, IMAGE)
    speed.take_turns(report, [result], 2, LocalSides(gpu, 1000), "Some GPU")
    assert report.failed == []  # the first losses agree
    steps, variants, kernels = (table["rows"] for table in report.record["tables"])
    assert [row[1] for row in steps] == ["fp32", "tf32"]
    assert steps[0][7].endswith(("(eager)", "(channels_last)")) and float(steps[0][4]) > 0
    assert {row[1] for row in variants} >= {"ours, graphs", "ours, no graphs", "PyTorch, eager"}
    assert sum(int(row[2]) for row in kernels) > 20
    notes = report.record["notes"]
    assert any("no graphs here" in note for note in notes)
    assert report.record["facts"]["floors are computed with"].endswith("(measured)")
    assert set(result.ms) == {
        *(("ours", "graphs", precision) for precision in ("fp32", "tf32")),
        ("ours", "no graphs", "fp32"),
        *(("theirs", v, p) for v in ("eager", "channels_last") for p in ("fp32", "tf32")),
        ("theirs", "channels_last", "bf16"),
    }
    assert all(len(times) >= 2 for times in result.ms.values())


def test_a_timing_without_time_or_with_wrong_losses_says_so():
    report, result = Report("timing"), speed.Timing("digits", 16, IMAGE)
    sides = LocalSides(None, 5)
    speed.take_turns(report, [result], 2, sides, "NVIDIA H200")
    assert "digits 16: no time left" in report.record["notes"]
    result.losses = {
        ("ours", "graphs", "fp32"): [2.0],
        ("theirs", "eager", "fp32"): [2.0001],
        ("theirs", "eager", "tf32"): [2.0001],
        ("theirs", "eager", "bf16"): [math.nan],
    }
    speed.compare_losses(report, result)
    assert [name.rpartition("eager ")[2] for name in report.failed] == ["fp32", "bf16"]


def test_tables_of_made_up_numbers():
    result = speed.Timing("digits", 128)
    result.ms = {
        ("ours", "graphs", "fp32"): [0.09, 0.08, 0.07],
        ("theirs", "eager", "fp32"): [0.8],
        ("theirs", "graph", "fp32"): [0.24],
        ("theirs", "graph+channels_last", "bf16"): [0.16],
        ("theirs", "eager", "tf32"): [0.7],
    }
    _, head, rows = tables.steps([result], floors.rates("NVIDIA H200"))
    assert len(rows) == 1 and len(rows[0]) == len(head)
    assert rows[0][2] == "**0.0800** (0.0700 to 0.0900)"
    assert rows[0][3] == "0.0370 (products 0.0207, bytes 0.0370 to 0.0535)"
    assert rows[0][4] == "2.16" and rows[0][5] == "42.8" and rows[0][6] == "1991"
    assert rows[0][7:] == ["0.240 (graph)", "**3.00**", "0.160 (graph+channels_last)"]
    _, head, rows = tables.variants([result])
    assert [row[0] for row in rows] == ["fp32", "fp32", "fp32", "tf32", "bf16"]
    assert rows[0][1:] == ["ours, graphs", "0.0800"]
    row = {"name": "conv", "shape": "8x1", "times": 2, "ms": 0.01, "bytes": 2e7, "flop": 1e9}
    result.kernels = [row] * 30
    _, head, rows = tables.kernels(result)
    assert len(rows) == tables.ROWS + 1 and rows[-1][0] == "6 others"
    assert rows[0] == ["conv", "8x1", "2", "10.0", "3.3 %", "2000", "100.0"]
    assert rows[-1][2:4] == ["12", "60.0"]


def test_a_report_as_markdown_and_in_its_file(tmp_path):
    report = Report("timing", str(tmp_path))
    report.fact("GPU", "Some | GPU")
    report.check("this", True, "fine")
    report.check("that", False, "1 of 2")
    report.note("skipped: more")
    report.table("Times", ["a", "b"], [["1", "2"]])
    report.table("Times", ["a", "b"], [["3", "4"]])
    record = load(str(tmp_path), "timing")
    assert record == report.record and not record["finished"] and report.failed == ["that"]
    text = markdown([record])
    assert "### timing, 0 s (not finished)" in text and "| GPU | Some \\| GPU |" in text
    assert "| that | 1 of 2 | **failed** |" in text and "- skipped: more" in text
    assert "Times:\n\n| a | b |\n| --- | --- |\n| 3 | 4 |" in text and "| 1 | 2 |" not in text
    assert load(str(tmp_path), "nothing") is None


def test_summaries_of_the_sanitizer():
    clean = "========= COMPUTE-SANITIZER\nok\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.summary(clean) == "ERROR SUMMARY: 0 errors"
    bad = "========= COMPUTE-SANITIZER\n========= Invalid read\n========= ERROR SUMMARY: 3 errors\n"
    assert sanitizer.summary(bad) == "ERROR SUMMARY: 3 errors; Invalid read"
    assert sanitizer.summary("no device\n") == "no device" and sanitizer.summary("") == "no output"


# the whole check


STAGE = """
import sys, time
from benchmarks.report import Report
name, folder, behaviour = sys.argv[1:]
report = Report(name, folder)
report.check("first", behaviour != "fail", "found")
if behaviour == "sleep":
    time.sleep(60)
if behaviour == "crash":
    sys.exit(7)
report.finish()
"""


def run_check(tmp_path, monkeypatch, capsys, behaviour, *words, gpus=("Some GPU",)):
    """Run a check whose stages behave as given. Return the exit code, last line and JSON."""
    short = [
        s._replace(seconds=1.5 if behaviour.get(s.name) == "sleep" else 60) for s in check.STAGES
    ]
    monkeypatch.setattr(check, "STAGES", tuple(short))

    def command(name, folder, seconds):
        return [sys.executable, "-c", STAGE, name, folder, behaviour.get(name, "pass")]

    out = tmp_path / "results"
    monkeypatch.setattr(check.thread_budget, "busy_share", lambda: 0.0)
    code = check.main(["--out", str(out), *words], visible_gpus(*gpus), command)
    lines = capsys.readouterr().out.strip().splitlines()
    return code, lines[-1], json.loads((out / "gpu-check.json").read_text())


def test_all_passes(tmp_path, monkeypatch, capsys):
    code, last, record = run_check(tmp_path, monkeypatch, capsys, {}, "--stages", "machine,timing")
    assert (code, last) == (0, "all passed") and record["failed"] == []
    assert [s["stage"] for s in record["stages"]] == ["machine", "timing"]
    text = (tmp_path / "results" / "gpu-check.md").read_text()
    assert text.startswith("`./run/gpu-check` on one Some GPU, ") and "### timing" in text


@pytest.mark.slow("gpu")
def test_failed_and_slow_stages_do_not_stop_the_others(tmp_path, monkeypatch, capsys):
    behaviour = {"machine": "fail", "training": "crash", "sanitizer": "sleep"}
    words = ["--stages", "machine,training,sanitizer,timing"]
    code, last, record = run_check(tmp_path, monkeypatch, capsys, behaviour, *words)
    assert code == 1
    assert last == (
        "failed: machine: first; training was not done: ended with exit code 7 "
        "(sanitizer was not done: out of time, stopped after 2 s)"
    )
    assert record["stages"][-1]["stage"] == "timing" and record["stages"][-1]["finished"]


def test_no_gpu_and_unknown_stages(tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match="no NVIDIA driver"):
        run_check(tmp_path, monkeypatch, capsys, {}, gpus=())
    with pytest.raises(UserError, match="did you mean timing"):
        check.main(["--stages", "timings"], visible_gpus("Some GPU"))
    with pytest.raises(UserError, match="no NVIDIA driver"):
        check.main(["--out", str(tmp_path)], visible_gpus())


def test_arguments_of_the_benchmark():
    options = arguments.parse(["gpu", "--settings", "digits:32", "--rounds", "3"])
    assert options.settings == [("digits", 32)]
    assert (options.rounds, options.limit, options.json) == (3, 900, None)
    with pytest.raises(UserError, match="NETWORK:BATCH"):
        arguments.parse(["gpu", "--settings", "digits"])
