"""Run one stage of the GPU check: `python -m benchmarks.gpu.stage NAME FOLDER SECONDS`.

FOLDER/NAME.json holds the results, even if the stage is stopped early. `python -m
benchmarks.gpu.stage small` is the program for compute-sanitizer: it runs all ops on a few images
and a short training run.
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
from benchmarks.report import Report
from mpidl.backends.gpu.discovery import versions, visible
from mpidl.cli import start
from mpidl.comm import World, failure
from mpidl.comm.launcher import environment
from mpidl.nn import AveragePool2D, BatchNorm, Conv2D, Dense, MaxPool2D, Network, ReLU, zoo
from mpidl.training.options import configuration

EPOCHS = 20  # epochs of training by the recipe of the digits network
# Optional packages and their uses; the check needs only NumPy and CuPy.
PACKAGES = {
    "mpi4py": "more than one rank",
    "h5py": "train, predict: checkpoints and models",
    "PIL": "train, predict: image files, the digit set",
    "tomli_w": "train: options.toml",
    "rich": "the bar on a terminal",
    "threadpoolctl": "the name of NumPy's BLAS",
    "torch": "timing against PyTorch",
    "pytest": "the tests of the kernels",
}


def main(argv=None):
    """Run the stage and return its exit code."""
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
    """Return a world that computes on the GPU."""
    world = World(threads=None)
    world.use_device("gpu")
    return world


def cpu_world():
    """Return a second world that computes on the CPU."""
    world = World()
    world.device_request = "cpu", None  # this does not close the device, which the other world uses
    return world


def machine_stage(report, folder, seconds):
    """Report the versions, and how long the kernels of the networks take to compile."""
    world = gpu_world()
    facts(report, world.device)
    compiling.check_all(report, world)


def facts(report, device):
    """Add the machine, the versions and missing packages to the report."""
    from mpidl.backends.gpu import nvrtc

    report.fact(
        "GPU",
        f"{device.name}, {device.architecture}, {device.processors} multiprocessors, "
        f"{device.memory / 2**30:.0f} GiB",
    )
    cuda, driver = versions(), _driver()
    if driver:
        report.fact("driver", driver)
    if cuda is not None:
        report.fact("CuPy", f"{cuda.cupy}, for CUDA {cuda.made_for}; driver {cuda.can_run}")
    compiler = nvrtc.find(device.architecture)
    report.fact("NVRTC", f"{'.'.join(map(str, compiler.version))}, {compiler.path}")
    for package in ("numpy", "torch"):
        report.fact(package, configuration.version_of(package))
    report.fact("Python", platform.python_version())
    report.fact("platform", platform.platform())
    for line in start.without_kernels():
        report.note(line)
    for name, use in PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            report.note(f"{name} is not installed; it is for: {use}")


def _driver():
    """Return the driver's version from /proc, or None if it is unknown."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            match = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.readline())
    except OSError:
        return None
    return match[0] if match else None


def parity_stage(report, folder, seconds):
    """Check all ops at the sizes of the zoo's networks."""
    gpu_world()
    parity.check_all(report, {name: make() for name, make in zoo.NETWORKS.items()})


def tests_stage(report, folder, seconds):
    """Run the tests of the kernels on the real GPU instead of the emulated one."""
    tests = os.path.join(_root(), "tests", "backends")
    if importlib.util.find_spec("pytest") is None or not os.path.isdir(tests):
        report.note("skipped: pytest is not installed, or this is not a checkout")
        return
    variables = environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = ["-m", "pytest", tests, "--device", "cuda", "--slow", "all", "-q"]
    words += ["-p", "no:cacheprovider"]
    with open(os.path.join(folder, "tests.log"), "w+") as log:
        try:
            code = subprocess.run(
                [sys.executable, *words, "--maxfail", "20", "-rf"],
                env=variables,
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
        report.check("GPU tests", not bad, f"{progress.count('.')} passed, {bad} failed so far")
    else:
        report.check("GPU tests", code == 0, "; ".join([*failed[:5], *lines[-1:]]))


def training_stage(report, folder, seconds):
    """Compare training on the GPU with training on the CPU."""
    sets = training.digits(os.path.join(folder, "digits.npz"))
    gpu, cpu = gpu_world(), cpu_world()
    cpu.use_threads(0)
    training.parity(report, cpu, gpu, sets, EPOCHS)


def identity_stage(report, folder, seconds):
    """Check that repeated and resumed runs give the same bytes."""
    deadline = time.monotonic() + seconds
    data = os.path.join(folder, "digits.npz")
    training.digits(data)
    checkpoints = importlib.util.find_spec("h5py") is not None
    if not checkpoints:
        report.note("resuming is not checked: h5py is not installed")
    start_run = identity.Starter(folder, data, lambda: deadline - time.monotonic())
    identity.check_all(report, start_run, identity.other_rank_counts(report), checkpoints)


def sanitizer_stage(report, folder, seconds):
    """Run compute-sanitizer on the program `small`."""
    program = sanitizer.find()
    if program is None:
        report.note(
            "skipped: no compute-sanitizer on PATH, in CUDA_HOME, in /usr/local/cuda or in "
            "pip's packages"
        )
        return
    report.fact("compute-sanitizer", program)
    sanitizer.check_all(report, program, seconds)


def timing_stage(report, folder, seconds):
    """Time our training step and PyTorch's."""
    defaults = arguments.parse(["gpu"])
    speed.measure(report, defaults.settings, defaults.rounds, seconds, visible().gpus[0].name)


def small(world, kinds=parity.KINDS):
    """Check all ops on a few images, then train a few steps with and without graphs."""
    layers = [
        *(Conv2D(3, 8, padding=1), BatchNorm(), ReLU(), MaxPool2D(2)),
        *(Conv2D(3, 12, stride=2), BatchNorm(), ReLU(), AveragePool2D(2), Dense(10)),
    ]
    report = Report("small")
    parity.check_all(report, {"small": Network(layers, (3, 11, 11))}, kinds, count=20)
    sets = training.small_set((1, 9, 9), 40)
    for graphs in ("auto", "off"):
        options = {"epochs": 1, "batch_size": 24, "graphs": graphs}
        training.train(world, training.network(sets), sets, options)
    return 1 if report.failed else 0


def _root():
    """Return the checkout's folder."""
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
