"""Test the check and the timing of GPUs on an emulated GPU: errors, counts and reports."""

import itertools
import json
import math
import sys
import tarfile

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
from benchmarks.gpu.sizes import SMALL
from benchmarks.report import Report, load, markdown
from benchmarks.turns import Lost
from mpidl.backends.discovery import Gpu, Visible
from mpidl.backends.gpu import kernels, launching
from mpidl.backends.gpu.sums import Counts
from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.ranks.world import World

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


@needs_compiler
def test_parity_of_a_residual_network(gpu):
    """Every kind of layer is compared, also without a bias and with branches."""
    report = Report("parity")
    parity.check_network(report, gpu, "residual", SMALL.nets()["residual"])
    assert not report.failed and len(report.record["checks"]) == len(parity.KINDS)
    functions = {row[1] for row in report.record["tables"][0]["rows"]}
    expected = {"conv2d", "conv2d_backward", "dense_backward", "moments", "optimizer_step", "add"}
    expected |= {"concat", "split", "dropout", "cross_channel_norm", "pad2d", "prelu_dslope"}
    assert expected | {"transposed_conv2d_backward", "max_pool2d_dx"} <= functions


@needs_compiler
def test_parity_finds_an_error(gpu, monkeypatch):
    right = parity.REFERENCE.conv2d

    def with_error(**arguments):
        return right(**arguments) * (1 + 1e-5)

    monkeypatch.setattr(parity.REFERENCE, "conv2d", with_error)
    report = Report("parity")
    parity.check_network(report, gpu, "plain", SMALL.nets()["plain"], kinds=parity.KINDS[:1])
    assert report.failed == ["ops of plain, fp32"]
    assert report.record["checks"][0]["found"].endswith("too large: conv2d")


@pytest.mark.slow("gpu")
@needs_compiler
def test_parity_of_resnet18(gpu):
    """The layers of the zoo's residual networks are compared, here with few pixels."""
    report = Report("parity")
    net = subject.network("resnet18", (3, 32, 32))
    parity.check_network(report, gpu, "resnet18", net, count=2, kinds=parity.KINDS[:1])
    assert not report.failed


@needs_compiler
def test_every_op_is_compared(gpu, monkeypatch):
    report, rows = Report("parity"), parity.table(each_function_once=True)
    few = [row for row in rows if row[0].function in ("relu", "dense", "moments")]
    parity.check_table(report, few)
    assert not report.failed and report.record["checks"][0]["found"].startswith("3 cases of 3")
    assert {case.function for case, _ in rows} == {case.function for case, _ in parity.table()}
    assert len(parity.table()) > 5 * len(rows)
    monkeypatch.setattr(parity, "gpu_results", lambda case: [np.zeros(1)])
    parity.check_table(report, few[:1])
    assert report.failed == ["every op"]


def test_the_relative_error_of_nan_is_infinite():
    assert parity.relative(np.array([1.0, np.nan]), np.ones(2)) == math.inf
    assert parity.relative(np.zeros(3), np.zeros(3)) == 0


@needs_compiler
@pytest.mark.slow("gpu")
def test_the_stage_that_the_sanitizer_runs(gpu, capsys):
    assert stage.small(gpu, parity.KINDS[:1]) == 0
    assert "ops of plain, fp32" in capsys.readouterr().out


@needs_compiler
def test_the_units_of_a_call_are_found_without_computing(gpu):
    device = gpu.device
    units = stage.units_of(gpu, "quick", SMALL)
    assert gpu.device is launching.device() is device and not device.launched
    assert {"conv_gemm", "conv_dweight", "conv_direct", "lrn"} <= {u.family for u in units}
    assert any(("TERMS", 1) in unit.defines for unit in units)
    assert any(("BF16", 1) in unit.defines for unit in units)
    report, compiled = Report("machine"), []

    def compile_all(units, architecture, compile):
        compiled.extend(units)
        return ["fold: no"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "compile_all", compile_all)
        compiling.check_all(report, gpu, units[:3])
    assert len(set(compiled)) == len(compiled) and report.failed == ["kernels compile"]
    assert {unit.family for unit in compiled} == set(kernels.families())


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
    assert len(checks) == 7
    failed = [name for name in report.failed if not name.startswith("accuracy")]
    assert failed == []
    assert "4 iterations" in checks["losses at rate 1e-05: GPU and CPU"]["found"]
    names = [f"accuracy after 1 epochs in {precision}" for precision in ("fp32", "bf16")]
    assert report.failed == names  # random images teach nothing


def test_losses_that_differ_fail():
    report = Report("training")
    training.compare(report, "here", np.array([2.0, 1.001]), np.array([2.0, 1.0]), 1e-4)
    training.compare(report, "there", np.array([2.0]), np.array([2.0, 1.0]), 1.0)
    assert report.failed == ["here", "there"]
    assert "1.0e-03, in iteration 2" in report.record["checks"][0]["found"]


def fake_job(ranks, runs):
    """Return the results of made-up runs, of which those on 2 and 4 ranks fail."""
    if ranks == 4 and not runs[0].resume:
        return {}, "it broke"
    results = {}
    for run in runs:
        losses, kind = [3.0, 2.0, 1.0], "same"
        if run.out is not None:
            losses = losses[1:] if run.resume else losses[:1]
        if run.name == "2 ranks":
            losses, kind = [3.0, 2.5, 1.0], "other"
        kind = run.options.get("precision", kind)
        kind = "other" if run.name == "bf16, again" else kind
        results[run.name] = {"losses": losses, "sha256": kind}
    return results, "it was not reached"


def test_other_bytes_and_broken_runs_fail():
    report = Report("identity")
    identity.check_all(report, fake_job, iterations=3, stop=1)
    rounded = ["bf16, again", "tf32, 4 ranks", "bf16, 4 ranks"]
    assert report.failed == ["2 ranks", "4 ranks", *rounded]
    text = {c["what"]: c["found"] for c in report.record["checks"]}
    assert "losses differ from iteration 2" in text["2 ranks"] and text["4 ranks"] == "it broke"
    assert text["2 rank(s), resumed on 1 after iteration 1"] == "the same weights and losses"
    assert text["1 rank(s), resumed on 4 after iteration 1"] == "the same weights and losses"
    assert text["again"] == text["without graphs"] == text["tf32, again"]
    assert text["tf32 is not fp32"] == text["bf16 is not fp32"] == "other weights"


def test_the_digit_set_is_kept_in_a_file(tmp_path, monkeypatch):
    images = np.zeros((50, 4, 4), np.uint8), np.arange(50) % 10
    monkeypatch.setattr(
        "importlib.import_module", lambda name: type("", (), {"draw": lambda: images})
    )
    path = str(tmp_path / "digits.npz")
    for _ in range(2):
        train_set, test_set = training.load(path)
        monkeypatch.undo()  # the second call reads the file
    assert (len(train_set), len(test_set)) == (40, 10) or len(train_set) + len(test_set) == 50


# timing


@needs_compiler
@pytest.mark.slow("gpu")
def test_a_step_and_its_kernels(gpu, monkeypatch):
    # the products are counted from the shape for which a kernel is compiled
    monkeypatch.setattr(gpu.device, "specialize", True, raising=False)
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
    """Sides that run in this process: mpidl on the emulated GPU, PyTorch on the CPU.

    `alive` is the largest number of steps that were in memory at the same time.
    """

    def __init__(self, world, seconds):
        self.world, self.seconds, self.steps, self.torch, self.alive = world, seconds, {}, True, 0

    def left(self):
        return self.seconds

    def ask(self, kind, action, *rest):
        if action == "copy_rate":
            return 1e12
        if action == "rates":
            return {"fp32": 1e12, "tf32": 4e12, "bf16": 8e12}
        if action == "kernels":
            return ours.kernel_times(self.steps[kind, rest[0]], 1, delay_bytes=256)
        if action == "run":
            return self.steps[kind, rest[0]].run(1)
        name, options = rest
        if kind == "ours":
            step = self.steps[kind, name] = mpidl_step.RecordedStep(self.world, **options)
            self.alive = max(self.alive, len(self.steps))
            return step.losses(3)
        if not {"graph", "compile"}.isdisjoint(options["variant"].split("+")):
            raise Lost(kind, "no graphs here")
        step = self.steps[kind, name] = theirs.GpuStep(**options, device="cpu")
        self.alive = max(self.alive, len(self.steps))
        return step.first_losses

    def drop(self):
        self.steps.clear()


@needs_compiler
def test_the_timing_from_end_to_end(gpu):
    needs_torch()
    report, result = Report("timing"), speed.Timing("digits", 16, IMAGE)
    sides = LocalSides(gpu, 1000)
    speed.take_turns(report, [result], 2, sides, "Some GPU")
    assert report.failed == []  # the first losses agree
    assert sides.alive == 1  # each variant is freed before the next
    steps, variants, kernel_rows, _ = (table["rows"] for table in report.record["tables"])
    titles = [table["title"] for table in report.record["tables"]]
    assert [title.split(":")[0][-4:] for title in titles[2:]] == list(speed.OF_KERNELS)
    assert [row[1] for row in steps] == ["fp32", "tf32", "bf16"]
    assert steps[0][7].endswith(("(eager)", "(channels_last)")) and float(steps[0][4]) > 0
    assert {row[1] for row in variants} >= {"ours, graphs", "ours, no graphs", "PyTorch, eager"}
    assert sum(int(row[2]) for row in kernel_rows) > 20
    notes = report.record["notes"]
    assert any("no graphs here" in note for note in notes)
    assert report.record["facts"]["floors are computed with"].endswith("(measured)")
    assert set(result.ms) == {
        *(("ours", "graphs", precision) for precision in speed.PRECISIONS),
        ("ours", "no graphs", "fp32"),
        *(("theirs", v, p) for v in ("eager", "channels_last") for p in speed.PRECISIONS),
    }
    assert all(len(times) >= 2 for times in result.ms.values())


def test_a_timing_without_time_or_with_wrong_losses_says_so():
    report, result = Report("timing"), speed.Timing("digits", 16, IMAGE)
    sides = LocalSides(None, 4)
    speed.take_turns(report, [result], 2, sides, "NVIDIA H200")
    assert "digits 16, theirs compile+channels_last fp32: no time left" in report.record["notes"]
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
        ("ours", "graphs", "bf16"): [0.04],
        ("theirs", "eager", "tf32"): [0.7],
    }
    _, head, rows = tables.steps([result], floors.rates("NVIDIA H200"))
    assert len(rows) == 2 and len(rows[0]) == len(head)
    assert rows[0][2] == "**0.0800** (0.0700 to 0.0900)"
    assert rows[0][3] == "0.0370 (products 0.0207, bytes 0.0370 to 0.0535)"
    assert rows[0][4] == "2.16" and rows[0][5] == "42.8" and rows[0][6] == "1991"
    assert rows[0][7:] == ["0.240 (graph)", "**3.00**"]
    assert rows[1][3] == "0.0185 (products 0.0043, bytes 0.0185 to 0.0267)"
    assert rows[1][6:] == ["1991", "0.160 (graph+channels_last)", "**4.00**"]
    _, head, rows = tables.variants([result])
    assert [row[0] for row in rows] == ["fp32", "fp32", "fp32", "tf32", "bf16", "bf16"]
    assert rows[0][1:] == ["ours, graphs", "0.0800"]
    row = {"name": "conv", "shape": "8x1", "times": 2, "ms": 0.01, "bytes": 2e7, "flop": 1e9}
    result.kernels = {"bf16": [row] * 30}
    title, head, rows = tables.kernels(result, "bf16")
    assert title.startswith("digits 128, bf16: kernels by time, 300 ")
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


SANITIZER = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
{finding}
sleep 30
"""


@pytest.mark.parametrize("finding, passed", [("", True), ("echo '========= Invalid read'", False)])
def test_a_sanitizer_that_runs_out_of_time_leaves_what_it_found(finding, passed, tmp_path):
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER.format(finding=finding))
    program.chmod(0o755)
    report = Report("memcheck")
    sanitizer.check(report, str(program), "memcheck", 3, str(tmp_path))
    (check_made,) = report.record["checks"]
    assert check_made["passed"] == passed and report.record["notes"]
    assert (tmp_path / "memcheck.txt").read_text().startswith("========= COMPUTE-SANITIZER")
    assert passed or check_made["found"] == "Invalid read"


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


def members(path):
    """Return the contents of an archive, {name: text}."""
    with tarfile.open(path) as tar:
        return {name: tar.extractfile(name).read().decode() for name in tar.getnames()}


def run_check(tmp_path, monkeypatch, capsys, behaviour, *words, gpus=("Some GPU",)):
    """Run a check whose stages behave as given. Return the exit code, last line and archive."""
    short = [
        s._replace(seconds=1.5 if behaviour.get(s.name) == "sleep" else 60)
        for s in check.CALLS["second"]
    ]
    monkeypatch.setattr(check, "CALLS", {"second": tuple(short)})
    packed = []
    pack = check.pack

    def command(name, folder, seconds, call, sizes):
        return [sys.executable, "-c", STAGE, name, folder, behaviour.get(name, "pass")]

    def observed(folder, archive):
        pack(folder, archive)
        packed.append(set(members(archive)))

    out = tmp_path / "results"
    monkeypatch.setattr(check, "pack", observed)
    monkeypatch.setattr(check.thread_budget, "busy_share", lambda: 0.0)
    code = check.main(["--out", str(out), *words], visible_gpus(*gpus), command)
    lines = capsys.readouterr().out.strip().splitlines()
    assert [path.name for path in out.iterdir()] == ["second.tar"]
    assert all(earlier < later for earlier, later in itertools.pairwise(packed))
    return code, lines[-1], members(out / "second.tar")


def test_all_passes(tmp_path, monkeypatch, capsys):
    code, last, files = run_check(tmp_path, monkeypatch, capsys, {}, "--stages", "machine,timing")
    record = json.loads(files["gpu-check.json"])
    assert (code, last) == (0, "all passed") and record["failed"] == []
    assert [s["stage"] for s in record["stages"]] == ["machine", "timing"]
    text = files["gpu-check.md"]
    assert text.startswith("`./run/gpu-check --second` on one Some GPU, ")
    assert "### timing" in text and "first: found" in files["machine.log"]


@pytest.mark.slow("gpu")
def test_failed_and_slow_stages_do_not_stop_the_others(tmp_path, monkeypatch, capsys):
    behaviour = {"machine": "fail", "identity": "crash", "memcheck": "sleep"}
    words = ["--stages", "machine,memcheck,identity,timing"]
    code, last, files = run_check(tmp_path, monkeypatch, capsys, behaviour, *words)
    assert code == 1
    assert last == (
        "failed: machine: first; identity was not done: ended with exit code 7 "
        "(memcheck was not done: out of time, stopped after 2 s)"
    )
    stages = json.loads(files["gpu-check.json"])["stages"]
    assert stages[-1]["stage"] == "timing" and stages[-1]["finished"]
    partial = json.loads(files["memcheck.json"])
    assert partial["checks"] and not partial["finished"]


def test_a_stage_of_one_call_runs_only_this_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check.thread_budget, "busy_share", lambda: 0.0)

    def command(name, folder, seconds, call, sizes):
        return [sys.executable, "-c", STAGE, name, folder, "pass"]

    words = ["--out", str(tmp_path / "out"), "--stages", "parity"]
    assert check.main(words, visible_gpus("Some GPU"), command) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["quick.tar"]
    assert capsys.readouterr().out.count("all passed") == 1


def test_no_gpu_and_unknown_stages(tmp_path, monkeypatch, capsys):
    with pytest.raises(UserError, match="no NVIDIA driver"):
        run_check(tmp_path, monkeypatch, capsys, {}, gpus=())
    with pytest.raises(UserError, match="did you mean timing"):
        check.main(["--stages", "timings"], visible_gpus("Some GPU"))
    with pytest.raises(UserError, match="parity: not a stage of this call"):
        check.main(["--second", "--stages", "parity"], visible_gpus("Some GPU"))
    with pytest.raises(UserError, match="no NVIDIA driver"):
        check.main(["--out", str(tmp_path)], visible_gpus())


def test_arguments_of_the_benchmark():
    options = arguments.parse(["gpu", "--settings", "digits:32", "--rounds", "3"])
    assert options.settings == [("digits", 32)]
    assert (options.rounds, options.limit, options.json) == (3, 900, None)
    with pytest.raises(UserError, match="NETWORK:BATCH"):
        arguments.parse(["gpu", "--settings", "digits"])
