"""The results of `predict --tile`: pictures of the classes of pixels, or a file of scores."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidl import losses
from mpidl.data.datastore import Datastore
from mpidl.data.transforms import normalize
from mpidl.data.transforms.preprocess import AS_IT_IS, Preprocess
from mpidl.errors import UserError
from mpidl.evaluation import predict
from mpidl.evaluation.class_metrics import predicted_classes
from mpidl.files import on_rank_0, reason, write_whole
from mpidl.nn import Network
from mpidl.options.declaration import flag
from mpidl.ranks.world import World
from mpidl.report import arrays
from mpidl.text import class_names, printable
from mpidl.tiles.pictures import (
    DecodedPicture,
    Picture,
    Pictures,
    StoredPicture,
    TIFFPicture,
    open_pictures,
)
from mpidl.tiles.tiled import Band, TiledNetwork, check_preprocess, tiles_per_batch

UNDEFINED = 255  # value of a pixel whose scores include NaN
REFUSED = ("top_k", "confusion", "metrics", "activations")


def check_options(parsed: argparse.Namespace) -> None:
    """Raise UserError if an option is not for tiles, or if --out is missing or invalid."""
    for name in REFUSED:
        if getattr(parsed, name):
            raise UserError(
                f"{flag(name)}: expected no --tile with it: outputs of tiles are not compared with "
                "labels, and have no activations"
            )
    if parsed.on_bad_image != "stop":
        raise UserError("--on-bad-image skip: expected no --tile with it")
    if not parsed.out:
        raise UserError("--tile: expected --out FOLDER, FILE.npy or FILE.h5 with it, found none")
    if parsed.out.lower().endswith((".csv", ".png")):
        raise UserError(
            f"--out {printable(parsed.out)}: expected a folder for the pictures of classes, or "
            "FILE.npy or FILE.h5 for scores"
        )


def write_predictions(parsed: argparse.Namespace, world: World, net: Network) -> Pictures:
    """Predict the pictures of --data tile by tile, write --out, and print a summary. Collective."""
    tiled = TiledNetwork(net, parsed.tile, parsed.overlap, ("--tile", "--overlap"))
    has_scores = parsed.out.lower().endswith(arrays.ENDINGS)
    if not has_scores:
        check_classes(net, parsed.out)
    preprocess = net.preprocess or AS_IT_IS
    if parsed.preprocess:
        preprocess = Preprocess.of_options(parsed.preprocess)
    check_preprocess(preprocess, "--tile")
    pictures = open_pictures(parsed.data, world, losses.label_names(net), "--data")
    for picture in pictures:
        tiled.check(picture, preprocess)
    outputs: Any = None  # on rank 0
    create = ScoreFile if has_scores else MaskFiles
    options = {"world": world, "test_flips": parsed.test_flips, "sparing": True}
    options["batch_size"] = tiles_per_batch(parsed.batch_size, world)
    function = predict.outputs if has_scores else predict.class_scores

    def run(part: Network, tiles: Datastore) -> Any:
        _check_normalization(parsed.normalization, tiles)
        return predict.by_batch(part, tiles, function, **options)

    paths = on_rank_0(world, lambda: create.prepare(parsed.out, pictures))
    if world.rank == 0:
        outputs = create(paths, pictures, net)
    for bands in tiled.bands(pictures, run, preprocess):
        for band in bands:
            outputs.add(band)
    on_rank_0(world, lambda: outputs.close())
    if world.rank == 0:
        tiling = tiled.tiling
        print(f"Tiles: {tiling.side}x{tiling.side}, overlap {tiling.overlap}")
        print(outputs.describe(parsed.out))
        if has_targets(pictures):
            print("Accuracy: not computed, because outputs of tiles are not compared with targets")
    return pictures


def has_targets(pictures: Sequence[Picture]) -> bool:
    """Return whether the pictures belong to a data set with targets, such as masks."""
    stores = [picture.store for picture in pictures if isinstance(picture, StoredPicture)]
    return any(store.targets_shape is not None for store in stores[:1])


def check_classes(net: Network, out: str) -> None:
    """Raise UserError unless the outputs of a network are the scores of classes of pixels."""
    reason = ""
    if net.classes == ():
        reason = "predicts numbers"
    elif losses.has_separate_labels(net) and net.output_shape[0] > 1:
        reason = "predicts several labels per pixel"
    elif net.output_shape[0] > UNDEFINED:
        reason = f"has {net.output_shape[0]} classes, more than {UNDEFINED}"
    if reason:
        raise UserError(
            f"--out {printable(out)}: expected FILE.npy or FILE.h5 for a model that {reason}"
        )


def _check_normalization(name, images):
    if name and normalize.needs_statistics(name, images):
        raise UserError(f"--normalization {name}: expected 8-bit images, found {images.dtype}")


class MaskFiles:
    """A PNG file per picture, whose pixels are classes, shown in the colours of a palette."""

    def __init__(self, paths: Sequence[str], pictures: Sequence[Picture], net: Network):
        self.paths, self.pictures, self.net = paths, pictures, net
        self.mask = np.empty((0, 0), np.uint8)  # of the current picture
        self.problem: UserError | None = None

    @classmethod
    def prepare(cls, folder: str, pictures: Sequence[Picture]) -> list[str]:
        """Make the folders of the files, and return the path of each file.

        Raises UserError if two files would have the same path, or a file that of a picture.
        """
        paths = [os.path.join(folder, f"{picture.stem}.png") for picture in pictures]
        used: dict[str, str] = {}
        inputs = {
            os.path.realpath(picture.facts.path): picture.name
            for picture in pictures
            if isinstance(picture, DecodedPicture | TIFFPicture)
        }
        for path, picture in zip(paths, pictures, strict=True):
            other = used.setdefault(path, picture.name)
            if other != picture.name:
                raise UserError(
                    f"--out {printable(folder)}: expected a name per picture, found "
                    f"{printable(path)} for {other} and {picture.name}"
                )
            if os.path.realpath(path) in inputs:
                raise UserError(
                    f"--out {printable(folder)}: expected another folder, because "
                    f"{printable(path)} is an image of --data"
                )
            try:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"--out {printable(folder)}: cannot be created: {reason(error)}"
                ) from None
        return paths

    def add(self, band: Band) -> None:
        """Add the next band; the last band of a picture writes the file of the picture."""
        height, width = self.pictures[band.picture].shape[1:]
        if band.first == 0:
            self.mask = np.empty((height, width), np.uint8)
        rows = predicted_classes(band.scores[None])[0]
        rows[rows < 0] = UNDEFINED
        stop = band.first + len(rows)
        self.mask[band.first : stop] = rows
        if stop < height:
            return
        try:
            if self.problem is None:
                write_whole(self.paths[band.picture], _png(self.mask))
        except UserError as error:  # `close` raises it, so that all ranks finish computing
            self.problem = error

    def close(self) -> None:
        """Raise the UserError of the first file that could not be written."""
        if self.problem is not None:
            raise self.problem

    def describe(self, out: str) -> str:
        """Describe the files, and the classes that the values of pixels stand for."""
        count = max(self.net.output_shape[0], 2)
        names = class_names(losses.label_names(self.net), count)
        legend = ", ".join(f"{i} {printable(name)}" for i, name in enumerate(names))
        return f"Classes: {legend}\nMasks: {printable(out)} ({len(self.paths)} PNG files)"


class ScoreFile:
    """A file FILE.npy or FILE.h5 with the scores (n, K, H, W) of all pictures."""

    def __init__(self, paths: Sequence[str], pictures: Sequence[Picture], net: Network):
        shape = (len(pictures), net.output_shape[0], *pictures[0].shape[1:])
        facts = {"names": [picture.name for picture in pictures]}
        self.file = arrays.ArrayFile(paths[0], "outputs", shape, facts)

    @classmethod
    def prepare(cls, path: str, pictures: Sequence[Picture]) -> list[str]:
        """Return the path. Raises UserError if the pictures differ in size."""
        for picture in pictures:
            if picture.shape[1:] != pictures[0].shape[1:]:
                raise UserError(
                    f"--out {printable(path)}: expected images of one size for one array, found "
                    f"{pictures[0].shape[1:]} and {picture.shape[1:]} ({picture.name})"
                )
        return [path]

    def add(self, band: Band) -> None:
        """Write the next band."""
        self.file.write_rows(band.picture, band.first, band.scores)

    def close(self) -> None:
        """Finish the file. Raises UserError if it could not be written."""
        self.file.close()

    def describe(self, out: str) -> str:
        """Name the file."""
        return f"Outputs: {printable(out)}"


def _png(mask):
    from PIL import Image

    image = Image.fromarray(mask)
    image.putpalette(palette().tobytes())
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def palette() -> np.ndarray:
    """Return the colours of the values 0 to 255, uint8 (256, 3).

    As in the masks of the PASCAL VOC data set, the bits of a value are the high bits of the
    colours: value 0 is black, and values up to 7 have colours of half the brightness.
    """
    values, colours = np.arange(256), np.zeros((256, 3), np.uint8)
    for bit in range(8):
        colours[:, bit % 3] |= ((values >> bit & 1) << (7 - bit // 3)).astype(np.uint8)
    return colours
