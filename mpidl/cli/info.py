"""`python -m mpidl.info`: show hardware and libraries, or the layers of a network."""

import inspect
import os
import platform
import sys
from collections.abc import Sequence

import numpy as np

from mpidl.backends.cpu import builds
from mpidl.backends.gpu import cubins, discovery, nvrtc
from mpidl.cli import arguments, start
from mpidl.comm import World, devices, failure, nccl, thread_budget
from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.interchange import network_files
from mpidl.nn import zoo
from mpidl.nn.summary import times
from mpidl.text import name_list, printable
from mpidl.training.options import configuration, training_options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = arguments.info(argv, quiet=failure.launched_rank() > 0)
    world = World(timeout=60, threads=None)
    if parsed.network is not None or parsed.model is not None:
        show = _show_network if parsed.model is None else _show_model
        on_rank_0(world, lambda: show(parsed))
        return 0
    ranks = world.gather((world.host, thread_budget.available_cores()))
    warnings = start.arithmetic(world)
    local_gpus = devices.find_gpus(world.host)
    nccl_version = nccl.version() if local_gpus.gpus else 0
    gpus_by_rank = world.gather(local_gpus)
    abilities = world.gather(nccl.Capabilities(world.host, "", nccl_version, nccl.cuda_aware()))
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
        "threads": f"{' or '.join(map(str, threads))} per rank unless --threads is given",
        "CPU": f"{cpu_model()}, {os.cpu_count()} cores",
        "CPU features": ", ".join(_features()) or "not known",
        "MPI": _first_line(world.transport.MPI.Get_library_version()),
        "mpi4py": configuration.version_of("mpi4py"),
        "fabric": _fabric(world.transport.MPI.Get_library_version()),
        "GPU": _gpus(gpus_by_rank[0]),
        "CuPy": _cupy(),
        "NVRTC": ", ".join(_nvrtc()) or "none",
        "GPU cache": f"{cubins.folder()} (MPIDL_CACHE)",
        "GPU messages": _transport(gpus_by_rank, abilities),
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


def _show_network(parsed):
    """Print the layers of a network, with default sizes where the user gave none."""
    name = parsed.network
    sizes = {"input_shape": parsed.input_shape, "classes": parsed.classes}
    if name in zoo.NETWORKS:
        parameters = inspect.signature(zoo.NETWORKS[name]).parameters
        sizes = {key: parameters[key].default if v is None else v for key, v in sizes.items()}
    for key, size in sizes.items():
        if size is None and ".py:" in name:  # start.network reports other names
            flag = training_options.flag(key)
            raise UserError(f"--network {name}: expected {flag} too, found none")
    net = start.network(name, sizes["input_shape"], sizes["classes"], seed=0)
    batch_size = parsed.batch_size or zoo.RECIPES.get(name, {}).get("batch_size") or 128
    print(f"{name}, {sizes['classes']} classes")
    print(net.analyze(batch_size))


def _show_model(parsed):
    """Print the layers of a trained network and what it expects of its images."""
    net = network_files.load(parsed.model, start.user_layers(parsed.layers))
    names = f": {name_list(net.classes)}" if net.classes else ""
    print(f"{printable(parsed.model)}, outputs {times(net.output_shape)}{names}")
    normalization = "none" if net.normalization is None else net.normalization.name
    print(f"images {times(net.input_shape)}, normalization {normalization}")
    print(net.analyze(parsed.batch_size or 128))


def _arithmetic():
    """Describe the library that computes on the CPU of this rank."""
    library = builds.kernels()
    if library is None:
        return "NumPy"
    return f"C kernels, {library.build}, {library.provenance['compiler']}, {library.path}"


def _kernels():
    """List the builds of the kernels, and mark the builds that do not run on this CPU."""
    names = (
        build if builds.runs_here(build) else f"{build} (not on this CPU)"
        for build in builds.built()
    )
    return ", ".join(names) or "none"


def _first_line(text):
    return " ".join(text.strip().splitlines()[0].replace("\0", "").split())


def cpu_model() -> str:
    """Return the name of the CPU from /proc/cpuinfo, or else from the platform module."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _features():
    """Return the SIMD features of the CPU that NumPy can use."""
    extensions = np.show_config(mode="dicts").get("SIMD Extensions", {})
    return [*extensions.get("baseline", []), *extensions.get("found", [])]


def _fabric(library):
    """Describe the network that MPI uses, from the MPI library's version text and settings."""
    settings = [
        f"{name}={os.environ[name]}"
        for name in ("FI_PROVIDER", "UCX_TLS", "MPICH_CH4_NETMOD", "OMPI_MCA_pml", "OMPI_MCA_btl")
        if name in os.environ
    ]
    for line in library.splitlines():
        if "device" in line.lower():
            settings.insert(0, " ".join(line.partition(":")[2].split()))
    return ", ".join(settings) or "the MPI library's own choice"


def _gpus(visible):
    """Describe the GPUs that a rank may use, or the reason if there are none."""
    if not visible.gpus:
        return f"none: {visible.reason}"
    return "; ".join(
        f"{gpu.index}: {gpu.name}, {gpu.architecture}, {gpu.processors} processors, "
        f"{gpu.memory / 2**30:.0f} GB"
        for gpu in visible.gpus
    )


def _cupy():
    versions, packages = discovery.versions(), ", ".join(discovery.packages())
    if not packages:
        return "not installed"
    if versions is None:
        return f"{packages}, which cannot be loaded"
    driver = "no driver"
    if versions.can_run != "0.0":
        driver = f"the driver supports up to {versions.can_run}"
    return f"{packages}, for CUDA {versions.made_for}; {driver}"


def _nvrtc():
    """Yield each installed version of NVRTC with the architectures that it compiles for."""
    for library in nvrtc.installed():
        architectures = library.architectures
        version = ".".join(map(str, library.version))
        yield f"{version} (sm_{min(architectures)} to sm_{max(architectures)}, {library.path})"


def _transport(gpus_by_rank, abilities):
    """Describe how ranks would exchange the terms of sums between GPUs."""
    try:
        gpus = devices.assign_gpus(gpus_by_rank, "gpu").gpus
        ranks = [a._replace(identity=gpu.identity) for a, gpu in zip(abilities, gpus, strict=True)]
        transport = nccl.choose_transport(ranks, os.environ.get(nccl.VARIABLE))
    except UserError as error:
        return f"none: {error}" if any(rank.gpus for rank in gpus_by_rank) else "none"
    words = {"host": "through host memory", "mpi": "by MPI", "nccl": "by NCCL"}[transport]
    no_sums = ", nothing with one rank" if len(ranks) == 1 else ""
    return f"{words}{no_sums} ({nccl.VARIABLE})"


def _ranges(numbers):
    """Format sorted numbers as ranges: [0, 1, 2, 5] gives "0-2,5"."""
    parts, first = [], None
    for i, n in enumerate(numbers):
        first = n if first is None else first
        if i + 1 == len(numbers) or numbers[i + 1] != n + 1:
            parts.append(f"{first}-{n}" if n > first else f"{n}")
            first = None
    return ",".join(parts)
