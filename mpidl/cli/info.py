"""`python -m mpidl.info`: show hardware and libraries, or the layers of a network."""

import argparse
import inspect
import json
import os
import platform
import sys
from collections.abc import Sequence

import numpy as np

from mpidl import numerics
from mpidl.backends import discovery
from mpidl.backends.cpu import builds
from mpidl.cli import arguments, device_probe, device_report, start, user_files
from mpidl.cli.parser import Parser, image_shape
from mpidl.comm import nccl
from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.nn import zoo
from mpidl.nn.summary import times
from mpidl.options.declaration import flag
from mpidl.ranks import devices, failure
from mpidl.ranks.world import World
from mpidl.text import name_list, printable
from mpidl.training.options import configuration


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.info; `arguments.train` describes parameters and errors.

    An attribute is None if the user did not type it. Without a network or a model, the command
    shows the machines of all ranks.
    """
    parser = Parser(
        "mpidl.info",
        "Show what mpidl found on this machine and its ranks, or the layers of a network.",
        quiet,
    )
    parser.text(
        "--network",
        "NAME",
        "Show the layers of this network with their learnables, memory and operations: "
        f"{', '.join(zoo.NETWORKS)} or FILE.py:FUNCTION",
        zoo.NETWORKS,
    )
    parser.text("--model", "FILE", f"Show the layers of a file. {arguments.MODEL_HELP}")
    parser.text("--layers", "FILE.py", "Python file with the custom layer classes of --model")
    parser.text(
        "--input-shape",
        "C,H,W",
        "Shape of an image for --network; default: the network's usual shape",
        type=image_shape,
    )
    parser.number(
        "--classes", "Number of classes for --network; default: the network's usual number"
    )
    parser.number(
        "--batch-size",
        "Images per mini-batch for --network or --model; default: the value in the recipe of "
        "--network, else 128",
    )
    parser.number(
        "--threads",
        "Threads per rank that the report assumes; default: the cores divided among the ranks",
    )
    text = "Print the facts about each rank and the warnings as JSON"
    parser.add_argument("--json", action="store_const", const=True, help=text)
    parsed = parser.parse(argv)
    network, model = parsed.network, parsed.model
    if model is not None and network is not None:
        raise UserError("--model and --network: expected at most one of them")
    with_network, neither = "--network NAME with it, found none", network is None and model is None
    for name, is_wrong, expected in (
        ("layers", model is None, "--model FILE with it, found none"),
        ("batch_size", neither, with_network),
        ("threads", not neither, "neither --network nor --model with it"),
        ("json", not neither, "neither --network nor --model with it"),
        ("input_shape", network is None, with_network),
        ("classes", network is None, with_network),
    ):
        if is_wrong and getattr(parsed, name) is not None:
            raise UserError(f"{flag(name)}: expected {expected}")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    world = World(timeout=60, threads=None)
    if parsed.network is not None or parsed.model is not None:
        show = _show_network if parsed.model is None else _show_model
        on_rank_0(world, lambda: show(parsed))
        return 0
    own_report = device_probe.probe(world)
    ranks = world.gather(own_report)
    arithmetic = start.arithmetic(world)
    nccl_version = nccl.version() if own_report.gpus.gpus else 0
    abilities = world.gather(nccl.Capabilities(world.host, "", nccl_version, nccl.cuda_aware()))
    if ranks is None or abilities is None:  # on the other ranks
        return 0
    report = device_report.compare(
        ranks,
        parsed.threads or 0,
        lambda threads: device_report.binding_command(
            threads, ranks[0].mpi, "SLURM_JOB_ID" in os.environ
        ),
    )
    report.warnings[:0] = [*arithmetic, *start.slow_mpi(world)]
    if parsed.json:
        print(json.dumps(device_report.as_json(report), indent=1))
        return 0
    gpus_by_rank = [rank.gpus for rank in ranks]
    package = os.path.dirname(os.path.dirname(__file__))
    facts = {
        "mpidl": f"{configuration.version_of('mpidl')}, {package}",
        "Python": f"{platform.python_version()}, {sys.executable}",
        "NumPy": f"{np.__version__}, BLAS {start.blas()}, one thread",
        "arithmetic": _arithmetic(),
        "numerics": f"{numerics.VERSION}, the version of mpidl's arithmetic",
        "kernels": _kernels(),
        "bf16": _bf16(builds.running()),
        "CPU": "",  # reserves the position; device_report.facts sets the value
        "CPU features": ", ".join(_features()) or "not known",
        **device_report.facts(report),
        "mpi4py": configuration.version_of("mpi4py"),
        "GPU": _gpus(gpus_by_rank[0]),
        "CuPy": _cupy(),
        **_compiler(),
        "GPU messages": _transport(gpus_by_rank, abilities),
    }
    for name, fact in facts.items():
        print(f"{name:13} {fact}")
    hosts = len({rank.host for rank in ranks})
    print(f"{'ranks':13} {world.size} on {hosts} host(s)\n")
    for line in [*device_report.table(report), *report.warnings]:
        print(line)
    return 0


def _show_network(parsed):
    """Print the layers of a network. Sizes that the user omitted get the network's defaults."""
    name = parsed.network
    sizes = {"input_shape": parsed.input_shape, "classes": parsed.classes}
    if name in zoo.NETWORKS:
        parameters = inspect.signature(zoo.NETWORKS[name]).parameters
        sizes = {key: parameters[key].default if v is None else v for key, v in sizes.items()}
    for key, size in sizes.items():
        if size is None and ".py:" in name:  # start.network reports unknown names
            raise UserError(f"--network {name}: expected {flag(key)} too, found none")
    net = start.network(name, sizes["input_shape"], sizes["classes"], seed=0)
    batch_size = parsed.batch_size or zoo.RECIPES.get(name, {}).get("batch_size") or 128
    print(f"{name}, {sizes['classes']} classes")
    print(net.analyze(batch_size))


def _show_model(parsed):
    """Print the layers of a trained network and the images that it expects."""
    net = start.load_network(parsed.model, user_files.user_layers(parsed.layers))
    names = f": {name_list(net.classes)}" if net.classes else ""
    print(f"{printable(parsed.model)}, outputs {times(net.output_shape)}{names}")
    normalization = "none" if net.normalization is None else net.normalization.name
    precision = net.trained_precision and f", trained in {printable(net.trained_precision)}"
    print(f"images {times(net.input_shape)}, normalization {normalization}{precision or ''}")
    print(f"made by {printable(numerics.describe(net.numerics, net.mpidl_version))}")
    print(net.analyze(parsed.batch_size or 128))


def _arithmetic():
    """Describe the library that computes on the CPU of this rank."""
    library = builds.kernels()
    if library is None:
        return "NumPy"
    return f"C kernels, {library.build}, {library.provenance['compiler']}, {library.path}"


def _kernels():
    """List the builds of the kernels, with their bf16 and a mark if they do not run on this CPU."""
    names = (
        f"{build} ({'native' if builds.has_native_bf16(build) else 'widened'} bf16"
        f"{'' if builds.runs_here(build) else ', not on this CPU'})"
        for build in builds.built()
    )
    return ", ".join(names) or "none"


def _bf16(build):
    """Say how a build computes with --precision bf16."""
    if build == "numpy":
        return "by NumPy, slow"
    if builds.has_native_bf16(build):
        return "native (AVX512_BF16)"
    if build == "generic" and platform.machine() == "x86_64":  # no fused multiply-add
        return "widened to float32; other bytes than native"
    return "widened to float32; the same bytes as native"


def _features():
    """Return the SIMD features of the CPU that NumPy can use."""
    extensions = np.show_config(mode="dicts").get("SIMD Extensions", {})
    return [*extensions.get("baseline", []), *extensions.get("found", [])]


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


def _compiler():
    """Describe the installed versions of NVRTC and the cache of kernels, if mpidl has any."""
    if not discovery.has_kernels():
        return {}
    from mpidl.backends.gpu import cubins, nvrtc

    versions = [
        f"{'.'.join(map(str, library.version))} (sm_{min(library.architectures)} to "
        f"sm_{max(library.architectures)}, {library.path})"
        for library in nvrtc.installed()
    ]
    return {
        "NVRTC": ", ".join(versions) or "none",
        "GPU cache": f"{cubins.folder()} (MPIDL_CACHE)",
    }


def _transport(gpus_by_rank, abilities):
    """Describe how ranks would exchange the terms of sums between GPUs."""
    try:
        gpus = devices.assign_gpus(gpus_by_rank, "gpu").gpus or []
        ranks = [a._replace(identity=gpu.identity) for a, gpu in zip(abilities, gpus, strict=True)]
        transport = nccl.choose_transport(ranks, os.environ.get(nccl.VARIABLE))
    except UserError as error:
        return f"none: {error}" if any(rank.gpus for rank in gpus_by_rank) else "none"
    words = {"host": "through host memory", "mpi": "by MPI", "nccl": "by NCCL"}[transport]
    no_sums = ", nothing with one rank" if len(ranks) == 1 else ""
    return f"{words}{no_sums} ({nccl.VARIABLE})"
