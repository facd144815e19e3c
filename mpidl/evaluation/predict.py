"""Compute the outputs of a trained network: scores, classes and activations of layers.

Results have the same bytes on any number of ranks. Each image is processed exactly once, in a block
of 16 images, and no image is repeated to balance the ranks. Predictions take less time than the
forward pass of training, from which they differ only by rounding: batch normalizations are folded
into the weights, and 3x3 convolutions use Winograd's F(4x4).
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, overload

import numpy as np

from mpidl import losses, ops
from mpidl.backends import fast_convolutions
from mpidl.core.blocks import Blocked
from mpidl.data import ArrayDatastore, MinibatchQueue
from mpidl.data.array_datastore import Arrays
from mpidl.data.datastore import Datastore
from mpidl.data.loading.bad_images import BadImages
from mpidl.errors import UserError
from mpidl.evaluation import planned
from mpidl.evaluation.class_metrics import predicted_classes
from mpidl.evaluation.evaluate import BATCH, evaluated_images, evaluating_world, in_order
from mpidl.evaluation.mirrored import Flips, mirrored
from mpidl.matlab_names import explain_arguments
from mpidl.nn import Network
from mpidl.nn.inference import fold_batchnorm
from mpidl.nn.layers import Sigmoid, Softmax
from mpidl.nn.network_check import need_network
from mpidl.ranks.world import World


@overload
def predict(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    softmax: bool | None = None,
    test_flips: Flips = "none",
    tile: int | None = None,
    overlap: int | None = None,
    everywhere: Literal[True] = True,
) -> np.ndarray: ...
@overload
def predict(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    softmax: bool | None = None,
    test_flips: Flips = "none",
    tile: int | None = None,
    overlap: int | None = None,
    everywhere: bool,
) -> np.ndarray | None: ...
@explain_arguments
def predict(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    softmax: bool | None = None,
    test_flips: Flips = "none",
    tile: int | None = None,
    overlap: int | None = None,
    everywhere: bool = True,
) -> np.ndarray | None:
    """Return the network's output for each image, in prediction mode. Collective.

    Parameters
    ----------
    net : Network
        The network.
    images : Datastore, MinibatchQueue, (images, labels) or ndarray of shape (n, C, H, W)
        The images. For a queue, see `evaluate`. An array must be the same on every rank. If the
        network has no normalization, uint8 pixels are divided by 255, and floats are used
        unchanged.
    world : World, optional
        The ranks that share the images. The default is all ranks.
    batch_size : int
        Number of images per mini-batch, over all ranks.
    softmax : bool, optional
        Whether to convert the outputs to class scores with softmax. Softmax applies to each image
        or, if the outputs have shape (K, H, W), to each pixel. Softmax is not applied twice if the
        network ends in `Softmax`. The default is False if the outputs do not have shape (K,), if
        the images have targets, or if the network was trained to predict numbers or several labels
        per image. Otherwise the default is True. If `net.loss` is None, a final `Sigmoid` layer
        means that the network predicts several labels.
    test_flips : {"none", "x", "y", "xy"}
        Average the outputs over mirror images: left to right, top to bottom, or both ways.
    tile : int, optional
        Predict images of any size in square tiles of this side, and blend the outputs. The network
        must have outputs (K, H, W). At most 16 tiles per rank form a mini-batch.
    overlap : int, optional
        Pixels that neighbouring tiles share at least, by default an eighth of the tile.
    everywhere : bool
        Whether all ranks get the result. If False, only rank 0 gets it.

    Returns
    -------
    ndarray of float32, shape (n, *output shape), or None
        None on ranks other than 0 if `everywhere` is False.

    Raises
    ------
    UserError
        If the network expects images of another shape, or cannot read tiles.
    """
    in_tiles = tile is not None or overlap is not None
    images = images_for(net, images, in_tiles)
    if softmax is None:
        softmax = len(net.output_shape) == 1 and images.targets_shape is None
        softmax = softmax and not losses.has_separate_labels(net) and net.classes != ()
    function = scores if softmax else outputs
    options: dict[str, Any] = {"world": world, "batch_size": batch_size, "everywhere": everywhere}
    options["test_flips"] = test_flips
    if in_tiles:
        return _collect_tiled(net, images, function, tile=tile, overlap=overlap, **options)
    return _collect(net, images, function, shape=net.output_shape, **options)


@overload
def classify(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    names: bool = False,
    test_flips: Flips = "none",
    tile: int | None = None,
    overlap: int | None = None,
    everywhere: Literal[True] = True,
) -> np.ndarray: ...
@overload
def classify(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    names: bool = False,
    test_flips: Flips = "none",
    tile: int | None = None,
    overlap: int | None = None,
    everywhere: bool,
) -> np.ndarray | None: ...
@explain_arguments
def classify(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    names: bool = False,
    test_flips: Flips = "none",
    tile: int | None = None,
    overlap: int | None = None,
    everywhere: bool = True,
) -> np.ndarray | None:
    """Return the class of each image, in prediction mode. Collective.

    The class is the index of the largest output; ties go to the lowest index. If the only output is
    the score of the second of two classes, the class is 1 if its probability is above 1/2. The
    class is -1 if an output is NaN.

    Parameters
    ----------
    net, images, world, batch_size, test_flips, tile, overlap, everywhere
        See `predict`. With tiles, the class is that of the largest blended output.
    names : bool
        Whether to return the names of the classes, ``net.classes``, instead of their indices. The
        name is "" if an output is NaN.

    Returns
    -------
    ndarray of int64 or of str, shape (n,), or None
        The shape is (n, ...) if the network has outputs of shape (K, ...). The result is None on
        ranks other than 0 if `everywhere` is False.

    Raises
    ------
    UserError
        If the network expects images of another shape or was trained for regression, or if `names`
        is True and the network has no class names.
    """
    need_network(net)
    if losses.has_separate_labels(net):
        reason, bound = "its loss is binary-crossentropy", "0"
        if isinstance(net.layers[-1], Sigmoid):
            reason, bound = "it ends in Sigmoid", "0.5"
        raise UserError(
            "classify: expected a network whose outputs are class scores, found one for several "
            f"labels per image ({reason}): use dl.predict(...) > {bound}"
        )
    if net.classes == ():
        raise UserError(
            "classify: expected a network whose outputs are class scores, found one trained for "
            "regression (its `classes` are ()): use dl.predict"
        )
    if names and net.classes is None:
        raise UserError(
            "classify: names=True: expected a network with class names, found none (its `classes` "
            'are None): set net.classes = ("cat", "dog", ...)'
        )
    in_tiles = tile is not None or overlap is not None
    images = images_for(net, images, in_tiles)
    options: dict[str, Any] = {"world": world, "batch_size": batch_size, "everywhere": everywhere}
    options["test_flips"] = test_flips
    if in_tiles:
        options |= {"tile": tile, "overlap": overlap, "finish": _classes_of_pixels}
        indices = _collect_tiled(net, images, class_scores, **options)
    else:
        shape = net.output_shape[1:]
        indices = _collect(net, images, labels, shape=shape, dtype=np.int64, **options)
    if not names or indices is None:
        return indices
    return np.array([*(net.classes or ()), ""])[indices]  # -1, for NaN outputs, selects ""


@overload
def activations(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    layer: str,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    everywhere: Literal[True] = True,
) -> np.ndarray: ...
@overload
def activations(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    layer: str,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    everywhere: bool,
) -> np.ndarray | None: ...
@explain_arguments
def activations(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    layer: str,
    *,
    world: World | None = None,
    batch_size: int = BATCH,
    everywhere: bool = True,
) -> np.ndarray | None:
    """Return a layer's output for each image, in prediction mode. Collective.

    Only this layer and the layers that it depends on are computed.

    Parameters
    ----------
    layer : str
        Name of the layer.
    net, images, world, batch_size, everywhere
        See `predict`.

    Returns
    -------
    ndarray of float32, shape (n, *output shape of the layer), or None
        None on ranks other than 0 if `everywhere` is False.

    Raises
    ------
    KeyError
        If no layer has this name.
    UserError
        If the network expects images of another shape.
    """
    part, images = net.up_to(layer), images_for(net, images)
    return _collect(
        part,
        images,
        outputs,
        shape=part.output_shape,
        world=world,
        batch_size=batch_size,
        everywhere=everywhere,
    )


def scores(net: Network, images: Blocked) -> np.ndarray:
    """Return the class scores (after softmax) of this rank's images, (n, K, ...)."""
    return ops.softmax(net.logits(images)).local()


def outputs(net: Network, images: Blocked) -> np.ndarray:
    """Return the network's outputs for this rank's images, (n, *output shape)."""
    return net(images).local()


def probabilities(net: Network, images: Blocked) -> np.ndarray:
    """Return the label probabilities (after sigmoid) of this rank's images, (n, K, ...)."""
    return ops.sigmoid(net.logits(images, Sigmoid)).local()


def class_scores(net: Network, images: Blocked) -> np.ndarray:
    """Return the outputs from which `labels` determines the classes, (n, K, ...)."""
    last_layer = Sigmoid if net.output_shape[0] == 1 else Softmax
    return net.logits(images, last_layer).local()


def labels(net: Network, images: Blocked) -> np.ndarray:
    """Return the classes of this rank's images, int64 (n, ...)."""
    return predicted_classes(class_scores(net, images))


def scores_and_labels(net: Network, images: Blocked) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the class scores of this rank's images, the outputs before softmax, and the classes.

    To rank the classes, sort the outputs before softmax, because softmax may round different
    outputs to equal scores.
    """
    logits = net.logits(images)
    ranked = logits.local()
    return ops.softmax(logits).local(), ranked, predicted_classes(ranked)


def by_batch(
    net: Network,
    datastore: Datastore,
    function: Callable[[Network, Blocked], Any],
    *,
    world: World,
    batch_size: int = BATCH,
    bad_images: BadImages | None = None,
    test_flips: Flips = "none",
    exact: bool = False,
    sparing: bool = False,
) -> Generator[tuple, None, None]:
    """Yield the results for each mini-batch on rank 0, in the order of the datastore.

    Collective: every rank must consume all mini-batches, of `batch_size` images over all ranks.
    `function(net, images)` returns an array, or a tuple of arrays, with one entry per image of this
    rank. Rank 0 gets the indices of the images with their entries, and other ranks get (None,
    None). `bad_images` receives the images that cannot be read, which are skipped; by default, such
    an image raises an error. With `exact`, the arithmetic is that of training, so that the function
    can compute gradients. With `sparing`, which is for large images, less memory is needed: that of
    the network is planned, threads read only one mini-batch in advance, and the results of each
    rank are an item.
    """
    queue: dict[str, Any] = {"prefetch": 1} if sparing else {}
    batches = in_order(net, datastore, world, batch_size, bad_images=bad_images, **queue)
    folded = (net if exact else fold_batchnorm(net)).on(world.device)
    memory = planned.memory_for(folded) if sparing else None
    net = mirrored(folded, test_flips)
    arithmetic = contextlib.nullcontext if exact else fast_convolutions
    for images, targets in batches:
        with arithmetic():
            result = function(net, images) if memory is None else memory.call(function, net, images)
        indices = images.batch.indices
        del images, targets  # frees memory for the next mini-batch
        shares = world.gather((indices, result)) or [(None, None)] * world.size
        del result
        if not sparing:
            yield shares[0] if world.rank else _joined(shares)
        while sparing and shares:
            yield shares.pop(0)
        del shares  # the next mini-batch needs this memory, too


def _joined(shares):
    """Return the indices and results of all ranks, each joined along the images."""
    indices, results = zip(*shares, strict=True)
    if isinstance(results[0], tuple):
        joined = tuple(map(_concatenated, zip(*results, strict=True)))
    else:
        joined = _concatenated(results)
    return np.concatenate(indices), joined


def _concatenated(parts):
    """Return the concatenation of arrays; the only array itself is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def images_for(
    net: Network,
    images: Datastore | MinibatchQueue | Arrays | np.ndarray,
    in_tiles: bool = False,
) -> Datastore:
    """Convert images to a datastore.

    Raises UserError if the network expects another image shape, unless it reads `in_tiles`.
    """
    need_network(net)
    if in_tiles and isinstance(images, MinibatchQueue):
        raise UserError("tile: expected images or a datastore, found a MinibatchQueue")
    if isinstance(images, Datastore | MinibatchQueue | tuple):
        images = evaluated_images(images)
    else:
        images = np.asarray(images)
        is_one = images.ndim == 3 and images.shape[0] == net.input_shape[0]
        is_one = is_one and (in_tiles or images.shape == net.input_shape)
        images = images[None] if is_one else images
        is_input = images.shape[1:] == net.input_shape
        layout = "NCHW" if is_input or (in_tiles and images.ndim == 4) else None
        images = ArrayDatastore(images, layout=layout)
    if not in_tiles and not net.takes(images.image_shape):
        raise UserError(
            f"{images.describe()}: expected images of shape {net.input_shape}, which the network "
            f"expects, found {images.image_shape}"
        )
    return images


def _collect(net, datastore, function, *, shape, dtype=np.float32, **options):
    """Call a function for all images, and collect its results in one array."""
    arrays = collect(net, datastore, function, entries=[(shape, dtype)], **options)
    return None if arrays is None else arrays[0]


def _collect_tiled(
    net, datastore, function, *, tile, overlap, world, everywhere, finish=None, **options
):
    """Call a function for all tiles of all images, and collect its blended results in one array.

    `finish` converts scores (K, m, W) of rows of an image to entries of the result.
    """
    from mpidl.tiles import tiled

    if tile is None:
        raise UserError(f"overlap {overlap}: expected it together with tile, the side of tiles")
    world, is_own = evaluating_world(world, datastore)
    options |= {"world": world, "batch_size": tiled.tiles_per_batch(options["batch_size"], world)}
    collected = tiled.scores_of_store(
        net,
        datastore,
        lambda part, tiles: by_batch(part, tiles, function, sparing=True, **options),
        tile=tile,
        overlap=overlap,
        finish=finish,
        world=world,
        everywhere=everywhere,
    )
    if is_own:
        world.close()
    return collected


def _classes_of_pixels(scores):
    """Return the classes (m, W) of scores (K, m, W)."""
    return predicted_classes(scores[None])[0]


def collect(
    net: Network,
    datastore: Datastore,
    function: Callable[[Network, Blocked], Any],
    *,
    entries: Sequence[tuple[tuple[int, ...], Any]],
    world: World | None,
    everywhere: bool,
    **options: Any,
) -> list[np.ndarray] | None:
    """Call a function for all images, as `by_batch` does, and collect its results in arrays.

    `entries` has the shape and the dtype of an image's entry in each of the function's results.
    Returns None on ranks other than 0 unless the results are needed everywhere.
    """
    world, is_own = evaluating_world(world, datastore)
    keeps, collected = everywhere or world.rank == 0, None
    if keeps:
        collected = [np.empty((len(datastore), *shape), dtype) for shape, dtype in entries]
    for batch in by_batch(net, datastore, function, world=world, **options):
        indices, results = world.broadcast(batch) if everywhere else batch
        if collected is not None:
            arrays = results if isinstance(results, tuple) else (results,)
            for array, values in zip(collected, arrays, strict=True):
                array[indices] = values
    if is_own:
        world.close()
    return collected
