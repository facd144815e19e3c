"""`python -m mpidl.info`: what mpidl found on this machine and its ranks."""

import inspect
import os
import platform
import sys

import numpy as np

from mpidl.backends.cpu import builds
from mpidl.backends.gpu import cubins, discovery, nvrtc
from mpidl.cli import arguments, start
from mpidl.comm import World, devices, failure, nccl, thread_budget
from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.nn import zoo
from mpidl.training.options import configuration, training_options


def main(argv=None):
    """Run the command; returns its exit code."""
    asked = arguments.info(argv, quiet=failure.launched_rank() > 0)
    world = World(timeout=60, threads=None)
    if asked.network is not None:
        on_rank_0(world, lambda: _show_network(asked))
        return 0
    ranks = world.gather((world.host, thread_budget.available_cores()))
    warnings = start.arithmetic(world)
    mine = devices.find_gpus(world.host)
    known = nccl.version() if mine.gpus else 0
    seen = world.gather(mine)
    able = world.gather(nccl.Capabilities(world.host, "", known, nccl.cuda_aware()))
    if world.rank:
        return 0
    threads = sorted(set(thread_budget.assign_threads(ranks, 0)[0]))
    package = os.path.dirname(os.path.dirname(__file__))
    facts = {
        "mpidl": f"{configuration.version_of('mpidl')}, {package}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "NumPy": f"{np.__version__}, BLAS {start.blas()}, one thread",
        "arithmetic": _arithmetic(),
        "kernels": _kernels(),
        "threads": f"{' or '.join(map(str, threads))} a rank, where --threads does not say",
        "CPU": f"{cpu_model()}, {os.cpu_count()} cores",
        "CPU features": ", ".join(_features()) or "not known",
        "MPI": _first_line(world.transport.MPI.Get_library_version()),
        "mpi4py": configuration.version_of("mpi4py"),
        "fabric": _fabric(world.transport.MPI.Get_library_version()),
        "GPU": _gpus(seen[0]),
        "CuPy": _cupy(),
        "NVRTC": ", ".join(_nvrtc()) or "none",
        "GPU cache": f"{cubins.folder()} (MPIDL_CACHE)",
        "GPU messages": _transport(seen, able),
    }
    for name, fact in facts.items():
        print(f"{name:13} {fact}")
    by_host = {}
    for rank, (host, (bound, _)) in enumerate(ranks):
        by_host.setdefault(host, []).append(f"{rank} on cores {_ranges(bound)}")
    print(f"{'ranks':13} {world.size} on {len(by_host)} host(s)")
    for host, lines in by_host.items():
        print(f"  {host}: " + "; ".join(f"rank {line}" for line in lines))
    for line in warnings:
        print(line)
    return 0


def _show_network(asked):
    """Print a network's layers; sizes that were not given are its own."""
    given = {"input_shape": asked.input_shape, "classes": asked.classes}
    if asked.network in zoo.NETWORKS:
        own = inspect.signature(zoo.NETWORKS[asked.network]).parameters
        given = {name: own[name].default if v is None else v for name, v in given.items()}
    for name, value in given.items():
        if value is None and ".py:" in asked.network:  # else the name is refused
            flag = training_options.flag(name)
            raise UserError(f"--network {asked.network}: expected {flag} too, found none")
    net = start.network(asked.network, given["input_shape"], given["classes"], seed=0)
    recipe = zoo.RECIPES.get(asked.network, {})
    batch_size = asked.batch_size or recipe.get("batch_size") or 128
    print(f"{asked.network}, {given['classes']} classes")
    print(net.analyze(batch_size))


def _arithmetic():
    """Who computes, on this rank."""
    library = builds.kernels()
    if library is None:
        return "NumPy"
    return f"C kernels, {library.build}, {library.provenance['compiler']}, {library.path}"


def _kernels():
    """The builds there are, and which of them do not run here."""
    names = (
        build if builds.runs_here(build) else f"{build} (not on this CPU)"
        for build in builds.built()
    )
    return ", ".join(names) or "none"


def _first_line(text):
    return " ".join(text.strip().splitlines()[0].replace("\0", "").split())


def cpu_model():
    """The CPU as /proc/cpuinfo names it, else as Python knows it."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _features():
    """The CPU's features that NumPy found and can use."""
    found = np.show_config(mode="dicts").get("SIMD Extensions", {})
    return [*found.get("baseline", []), *found.get("found", [])]


def _fabric(library):
    """How messages travel, as far as the MPI library's own description and settings tell."""
    chosen = [
        f"{name}={os.environ[name]}"
        for name in ("FI_PROVIDER", "UCX_TLS", "MPICH_CH4_NETMOD", "OMPI_MCA_pml", "OMPI_MCA_btl")
        if name in os.environ
    ]
    for line in library.splitlines():
        if "device" in line.lower():
            chosen.insert(0, " ".join(line.partition(":")[2].split()))
    return ", ".join(chosen) or "the MPI library's own choice"


def _gpus(seen):
    """The GPUs that rank 0 may use, or why none; what the driver counts beside them."""
    if not seen.gpus:
        return f"none: {seen.reason}"
    return "; ".join(
        f"{gpu.index}: {gpu.name}, {gpu.architecture}, {gpu.processors} processors, "
        f"{gpu.memory / 2**30:.0f} GB"
        for gpu in seen.gpus
    )


def _cupy():
    known, packages = discovery.versions(), ", ".join(discovery.packages())
    if not packages:
        return "not installed"
    if known is None:
        return f"{packages}, which does not load"
    driver = "no driver" if known.can_run == "0.0" else f"the driver runs up to {known.can_run}"
    return f"{packages}, for CUDA {known.made_for}; {driver}"


def _nvrtc():
    """The versions of NVRTC that are found, each with what it compiles for."""
    for found in nvrtc.installed():
        known = found.architectures
        version = ".".join(map(str, found.version))
        yield f"{version} (sm_{min(known)} to sm_{max(known)}, {found.path})"


def _transport(seen, able):
    """How sums would travel between the GPUs of the ranks."""
    try:
        taken = devices.assign_gpus(seen, "gpu").gpus
        ranks = [a._replace(identity=gpu.identity) for a, gpu in zip(able, taken, strict=True)]
        found = nccl.choose_transport(ranks, os.environ.get(nccl.VARIABLE))
    except UserError as error:
        return f"none: {error}" if any(rank.gpus for rank in seen) else "none"
    words = {"host": "through host memory", "mpi": "by MPI", "nccl": "by NCCL"}[found]
    nothing = ", nothing with one rank" if len(ranks) == 1 else ""
    return f"{words}{nothing} ({nccl.VARIABLE})"


def _ranges(numbers):
    """[0, 1, 2, 5] as 0-2,5."""
    parts, first = [], None
    for i, n in enumerate(numbers):
        first = n if first is None else first
        if i + 1 == len(numbers) or numbers[i + 1] != n + 1:
            parts.append(f"{first}-{n}" if n > first else f"{n}")
            first = None
    return ",".join(parts)
