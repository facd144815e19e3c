"""Run one stage of the GPU check: `python -m benchmarks.gpu.stage NAME FOLDER SECONDS CALL SIZES`.

FOLDER/NAME.json holds the results, even if the stage is stopped early. CALL is "quick" or "second",
SIZES "full" or "small". `python -m benchmarks.gpu.stage small` is the program for
compute-sanitizer: it runs the ops of small networks, and a short training run.
"""

import functools
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

from benchmarks.gpu import compiling, identity, parity, sanitizer, speed, training
from benchmarks.gpu.sizes import BY_NAME, SMALL
from benchmarks.mpidl_step import RecordedStep
from benchmarks.report import Report
from mpidl.backends.discovery import versions, visible
from mpidl.cli import start
from mpidl.core.blocks import LANES
from mpidl.launcher import environment
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.training.options import configuration

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
    folder, seconds, call, sizes = rest
    report = Report(name, folder)
    try:
        STAGES[name](report, folder, float(seconds), call, BY_NAME[sizes])
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


def machine_stage(report, folder, seconds, call, sizes):
    """Report the versions, and compile the kernels of this call's other stages on all cores."""
    world = gpu_world()
    facts(report, world.device)
    compiling.check_all(report, world, units_of(world, call, sizes))


def units_of(world, call, sizes):
    """Return the Units of the other stages' kernels, found without running a kernel."""
    with compiling.collected(world) as units:
        for network, batch, image in sizes.timing[call]:
            for precision in speed.PRECISIONS:
                RecordedStep(world, network, batch, precision, graphs=False, image=image)
        nets = list((sizes if call == "quick" else SMALL).nets().values())
        for net in nets:
            for _, precision, direct, _ in parity.KINDS:
                with parity.arithmetic(precision, direct):
                    parity.step(world, net, LANES if net is nets[-1] else parity.COUNT)
        parity.run_table(parity.table(sizes.each_function_once), parity.gpu_results)
    return list(units)


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


def parity_stage(report, folder, seconds, call, sizes):
    """Check the ops of networks, and every op.

    The largest network is last, with one block of images, because the reference takes longest.
    """
    world, nets = gpu_world(), sizes.nets()
    *first, (largest, largest_net) = nets.items()
    for title, net in first:
        parity.check_network(report, world, title, net)
    parity.check_table(report, parity.table(sizes.each_function_once))
    parity.check_network(report, world, largest, largest_net, LANES)


def tests_stage(report, folder, seconds, call, sizes):
    """Run the tests of the kernels on the real GPU instead of the emulated one."""
    if importlib.util.find_spec("pytest") is None or not os.path.isdir(parity.tests_folder()):
        report.note("skipped: pytest is not installed, or this is not a checkout")
        return
    variables = environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # without the strict options of pyproject.toml, which need all plugins of the tests
    words = ["-m", "pytest", "-o", "addopts=", *sizes.tests]
    words += ["--device", "cuda", "--slow", "all", "-q"]
    # 20 failures show what is wrong, and leave time for the timing. -rf lists them at the end.
    words += ["-p", "no:cacheprovider", "--maxfail", "20", "-rf"]
    path = os.path.join(folder, "pytest.txt")
    with open(path, "w") as log:
        try:
            code = subprocess.run(
                [sys.executable, *words],
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=max(seconds - 2, 1),
                cwd=os.path.dirname(parity.tests_folder()),
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    with open(path) as log:
        lines = [line.strip() for line in log if line.strip()]
    failed = [line for line in lines if line.startswith("FAILED")]
    if code is None:
        progress = "".join(re.findall(r"^([.FEsx]+) *(?:\[.*)?$", "\n".join(lines), re.M))
        report.note(f"not all tests ran within {seconds:.0f} s (see pytest.txt)")
        bad = sum(progress.count(letter) for letter in "FE")
        report.check("GPU tests", not bad, f"{progress.count('.')} passed, {bad} failed so far")
    else:
        report.check("GPU tests", code == 0, "; ".join([*failed[:5], *lines[-1:]]))


def training_stage(report, folder, seconds, call, sizes):
    """Compare training on the GPU with training on the CPU."""
    sets = training.load(os.path.join(folder, "images.npz"), sizes.is_small)
    gpu, cpu = gpu_world(), cpu_world()
    cpu.use_threads(0)
    make = functools.partial(training.network, name=sizes.trained)
    training.parity(report, cpu, gpu, sets, sizes.epochs, make, options=sizes.options)


def identity_stage(report, folder, seconds, call, sizes):
    """Check that repeated and resumed runs give the same bytes."""
    deadline = time.monotonic() + seconds
    data = os.path.join(folder, "images.npz")
    training.load(data, sizes.is_small)
    checkpoints = importlib.util.find_spec("h5py") is not None
    if not checkpoints:
        report.note("resuming is not checked: h5py is not installed")

    def left():
        return deadline - time.monotonic()

    jobs = identity.Starter(folder, data, left, sizes.options, sizes.trained)
    ranks = identity.other_rank_counts(report)
    identity.check_all(report, jobs, ranks, checkpoints, sizes.iterations, sizes.stop)


def sanitizer_stage(tool, report, folder, seconds, call, sizes):
    """Run a tool of compute-sanitizer on the program `small`."""
    program = sanitizer.find()
    if program is None:
        report.note(
            "skipped: no compute-sanitizer on PATH, in CUDA_HOME, in /usr/local/cuda or in "
            "pip's packages"
        )
        return
    report.fact("compute-sanitizer", program)
    sanitizer.check(report, program, tool, seconds, folder)


def timing_stage(report, folder, seconds, call, sizes):
    """Time our training step and PyTorch's."""
    gpu = visible().gpus[0].name
    speed.measure(report, sizes.timing[call], sizes.rounds, seconds, gpu, sizes.torch_device)


def small(world, kinds=parity.KINDS):
    """Compare the ops of small networks; train with and without graphs, and in bfloat16."""
    report = Report("small")
    for title, net in SMALL.nets().items():
        parity.check_network(report, world, title, net, kinds=kinds)
    train_set = training.small_set((1, 8, 8), 40)
    for changes in ({"graphs": "auto"}, {"graphs": "off"}, {"precision": "bf16"}):
        options = {"epochs": 1, "batch_size": 24, **changes}
        training.train(world, training.network(train_set, SMALL.trained), train_set, options)
    return 1 if report.failed else 0


STAGES: dict[str, Callable[..., None]] = {
    "machine": machine_stage,
    "parity": parity_stage,
    "tests": tests_stage,
    "training": training_stage,
    "identity": identity_stage,
    "memcheck": functools.partial(sanitizer_stage, "memcheck"),
    "racecheck": functools.partial(sanitizer_stage, "racecheck"),
    "timing": timing_stage,
}

if __name__ == "__main__":
    failure.run(main)
