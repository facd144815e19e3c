"""One stage of the check, a process of its own: `python -m benchmarks.gpu.stage NAME FOLDER
SECONDS`. What it found is in FOLDER/NAME.json, also where it is ended before it is done.

`... stage small` is what compute-sanitizer looks at: all ops on a few images, and a short training.
"""

import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
import traceback

from benchmarks import arguments
from benchmarks.gpu import compiling, identity, parity, sanitizer, speed, training
from benchmarks.gpu.report import Report
from mpidl.backends.gpu.discovery import versions, visible
from mpidl.cli import start, verify
from mpidl.comm import World, failure
from mpidl.nn import AveragePool2D, BatchNorm, Conv2D, Dense, MaxPool2D, Network, ReLU, zoo
from mpidl.training.options import configuration

EPOCHS = 20  # of the digits' recipe
# What other commands need beside NumPy and CuPy; the check needs none of it.
NEEDED = {
    "mpi4py": "more than one rank",
    "h5py": "train, predict: checkpoints and models",
    "PIL": "train, predict: image files, the digit set",
    "tomli_w": "train: options.toml",
    "rich": "the bar on a terminal",
    "threadpoolctl": "the name of NumPy's BLAS",
    "torch": "timing beside PyTorch",
    "pytest": "the tests of the kernels",
}


def main(argv=None):
    """Run the stage; returns its exit code."""
    name, *rest = sys.argv[1:] if argv is None else argv
    if name == "small":
        return small(gpu_world())
    folder, seconds = rest
    report = Report(name, folder)
    try:
        STAGES[name](report, folder, float(seconds))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        report.check(f"{name}, to its end", False, f"{type(error).__name__}: {text}")
    else:
        report.finish()
    return 1 if report.failed else 0


def gpu_world():
    """The world of this process, on a GPU."""
    world = World(threads=None)
    world.use_device("gpu")
    return world


def cpu_world():
    """One beside it that computes on the CPU."""
    world = World()
    world.device_request = "cpu", None  # the device is the other one's, and stays open
    return world


def machine_stage(report, folder, seconds):
    """Versions, and how long all kernels of the networks take to compile."""
    world = gpu_world()
    facts(report, world.device)
    compiling.check_all(report, world)


def facts(report, device):
    """What the machine is."""
    from mpidl.backends.gpu import nvrtc

    report.fact(
        "GPU",
        f"{device.name}, {device.architecture}, {device.processors} multiprocessors, "
        f"{device.memory / 2**30:.0f} GiB",
    )
    found, driver = versions(), _driver()
    if driver:
        report.fact("driver", driver)
    if found is not None:
        report.fact("CuPy", f"{found.cupy}, for CUDA {found.made_for}; driver {found.can_run}")
    compiler = nvrtc.find(device.architecture)
    report.fact("NVRTC", f"{'.'.join(map(str, compiler.version))}, {compiler.path}")
    for package in ("numpy", "torch"):
        report.fact(package, configuration.version_of(package))
    report.fact("Python", platform.python_version())
    report.fact("platform", platform.platform())
    for line in start.without_kernels():
        report.note(line)
    for name, use in NEEDED.items():
        if importlib.util.find_spec(name) is None:
            report.note(f"{name} is not installed; it is for: {use}")


def _driver():
    """The driver's version, as the system tells it."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            found = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.readline())
    except OSError:
        return None
    return found[0] if found else None


def parity_stage(report, folder, seconds):
    """All ops at the networks' sizes."""
    gpu_world()
    parity.check_all(report, {name: make() for name, make in zoo.NETWORKS.items()})


def tests_stage(report, folder, seconds):
    """The kernels' tests, on the GPU instead of the emulated one."""
    tests = os.path.join(_root(), "tests", "gpu")
    if importlib.util.find_spec("pytest") is None or not os.path.isdir(tests):
        report.note("left out: pytest is not installed, or this is no checkout")
        return
    environment = verify.environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = ["-m", "pytest", tests, "--device", "cuda", "--slow", "all", "-q"]
    words += ["-p", "no:cacheprovider"]
    with open(os.path.join(folder, "tests.log"), "w+") as log:
        try:
            code = subprocess.run(
                [sys.executable, *words, "--maxfail", "20", "-rf"],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=max(seconds - 2, 1),
                cwd=_root(),
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    failed = [line for line in lines if line.startswith("FAILED")]
    if code is None:
        progress = "".join(re.findall(r"^([.FEsx]+) *(?:\[.*)?$", "\n".join(lines), re.M))
        report.note(f"not all tests ran within {seconds:.0f} s (see tests.log)")
        bad = sum(progress.count(letter) for letter in "FE")
        report.check("tests/gpu", not bad, f"{progress.count('.')} passed, {bad} failed so far")
    else:
        report.check("tests/gpu", code == 0, "; ".join([*failed[:5], *lines[-1:]]))


def training_stage(report, folder, seconds):
    """The GPU's training beside the CPU's."""
    sets = training.digits(os.path.join(folder, "digits.npz"))
    gpu, cpu = gpu_world(), cpu_world()
    cpu.use_threads(0)
    training.parity(report, cpu, gpu, sets, EPOCHS)


def identity_stage(report, folder, seconds):
    """The same bytes."""
    deadline = time.monotonic() + seconds
    data = os.path.join(folder, "digits.npz")
    training.digits(data)
    checkpoints = importlib.util.find_spec("h5py") is not None
    if not checkpoints:
        report.note("no resume: h5py is not installed")
    start_run = identity.Starter(folder, data, lambda: deadline - time.monotonic())
    identity.check_all(report, start_run, identity.ranks_here(report), checkpoints)


def sanitizer_stage(report, folder, seconds):
    """compute-sanitizer on a small program."""
    program = sanitizer.find()
    if program is None:
        report.note(
            "left out: no compute-sanitizer on PATH, in CUDA_HOME, in /usr/local/cuda, or in pip's "
            "packages"
        )
        return
    report.fact("compute-sanitizer", program)
    sanitizer.check_all(report, program, seconds)


def timing_stage(report, folder, seconds):
    """Ours against PyTorch's."""
    usual = arguments.parse(["gpu"])
    settings = [speed.parsed(text) for text in usual.settings]
    speed.measure(report, settings, usual.rounds, seconds, visible().gpus[0].name)


def small(world, kinds=parity.KINDS):
    """All ops on a few images, and a few steps of training, with graphs and without."""
    layers = [
        *(Conv2D(3, 8, padding=1), BatchNorm(), ReLU(), MaxPool2D(2)),
        *(Conv2D(3, 12, stride=2), BatchNorm(), ReLU(), AveragePool2D(2), Dense(10)),
    ]
    report = Report("small")
    parity.check_all(report, {"small": Network(layers, (3, 11, 11))}, kinds, count=20)
    sets = training.small_set((1, 9, 9), 40)
    for graphs in ("auto", "off"):
        chosen = {"epochs": 1, "batch_size": 24, "graphs": graphs}
        training.train(world, training.network(sets), sets, chosen)
    return 1 if report.failed else 0


def _root():
    """The checkout's folder."""
    return os.path.dirname(os.path.dirname(os.path.dirname(start.__file__)))


STAGES = {
    "machine": machine_stage,
    "parity": parity_stage,
    "tests": tests_stage,
    "training": training_stage,
    "identity": identity_stage,
    "sanitizer": sanitizer_stage,
    "timing": timing_stage,
}

if __name__ == "__main__":
    failure.run(main)
