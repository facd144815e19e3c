"""The images of the command `train`: the sets that its options name, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mpidl import data
from mpidl.cli import pretrained, start
from mpidl.cli.pretrained import Pretrained
from mpidl.data import gallery, registry
from mpidl.data.loading.pipeline import Pipeline
from mpidl.data.registry import Sets
from mpidl.errors import UserError
from mpidl.evaluation import validation
from mpidl.files import on_rank_0, write_whole
from mpidl.text import printable
from mpidl.training import input_pipeline
from mpidl.training.options.configuration import Resolved
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.session import Session


class Images(NamedTuple):
    """The images of a run, and what follows from them.

    Attributes
    ----------
    sets : Sets
        The training, validation and test images.
    options : TrainingOptions
        The options, with the validation images.
    source : Pretrained or None
        The network of --weights.
    notes : list of str
        Lines to print before training.
    """

    sets: Sets
    options: TrainingOptions
    source: Pretrained | None
    notes: list[str]


def open_images(
    typed: Mapping[str, Any], resolved: Resolved, options: TrainingOptions, session: Session
) -> Images:
    """Open the training, validation and test images, and the network of --weights. Collective."""
    run, world = resolved.run, session.world
    preprocess = data.Preprocess.of_options(run)
    unused = _unused_validation(options, session.checkpoint)
    with session.console.stage("reading the data"):
        sets = registry.open_sets(
            run["data"],
            world,
            preprocess=preprocess,
            validation=run["validation_data"] is None,
            labelled_validation=unused is None,
        )
    source = pretrained.load(resolved, session.checkpoint, sets.train, world)
    if source is not None and not preprocess:
        preprocess = pretrained.conversion(source.net, sets.train, options)
        converted: list[Any] = [s and data.preprocessed(s, preprocess) for s in sets]
        sets = Sets(*converted)
    with session.console.stage("reading the test data"):
        train_set, test_set = start.with_test(
            run, sets.train, sets.test, world, preprocess, seed=options.seed, typed=typed
        )
    _check_counts(run["data"], train_set, test_set)
    if test_set is not None:
        _check_shape("--test-data", test_set, train_set)
    images, notes, source_of_validation = sets.validation, [], run["validation_data"]
    if source_of_validation is not None:
        images = _open_validation(
            source_of_validation, Sets(train_set, None, test_set), preprocess, options, world
        )
        options = replace(options, validation=images)
    elif images is not None and unused is None:
        _check_shape("--data", images, train_set)
        options = replace(options, validation=images)
    else:
        if images is not None:
            notes = [
                f"note: {unused}: the validation images in --data are not used: {images.describe()}"
            ]
        train_set, options = validation.held_out(train_set, options)
        if "validation_frequency" in typed and options.validation is None:
            raise UserError(
                f"--validation-frequency {options.validation_frequency}: expected validation "
                "images (--validation-data, --validation-fraction or --fold)"
            )
    input_pipeline.image_shape(options, train_set.image_shape)  # only to check the crop
    Pipeline(train_set, augmenter=data.Augmenter.of_options(options))  # only to check the rest
    return Images(Sets(train_set, options.validation, test_set), options, source, notes)


def draw_preview(path: str, images: Images, session: Session) -> int:
    """Write a picture of images before and after augmentation; return the exit code."""

    def draw():
        options = images.options
        picture = gallery.gallery(
            images.sets.train,
            data.Augmenter.of_options(options),
            options.seed,
            skip_unreadable=options.on_bad_image == "skip",
        )
        write_whole(path, picture)
        print(f"Preview: {printable(path)}")

    on_rank_0(session.world, draw)
    return 0


def _open_validation(source, sets, preprocess, options, world):
    """Return the images that --validation-data names."""
    validation.refuse_second_validation(options, f"--validation-data {source}")
    if source == "test":
        if sets.test is None:
            raise UserError(
                "--validation-data test: expected test images, found none (--test-fraction 0)"
            )
        return sets.test
    images = data.open_test_data(
        source, world, classes=sets.train.classes, option="--validation-data"
    )
    images = data.preprocessed(images, preprocess)
    _check_shape("--validation-data", images, sets.train)
    return images


def _unused_validation(options, checkpoint):
    """Return why validation images in --data are not used, or None if they are."""
    reason = validation.held_out_by(options)
    saved = {} if checkpoint is None else checkpoint[1].get("validation", {})
    if checkpoint is not None and saved.get("fingerprint") is None:
        reason = reason or "the resumed run had no validation"
    return reason


def _check_counts(source, train_set, test_set):
    """Raise UserError if the training set or the test set is empty."""
    if not len(train_set) or (test_set is not None and not len(test_set)):
        test_count = "none" if test_set is None else len(test_set)
        raise UserError(
            f"--data {source}: expected training and test images, found {len(train_set)} "
            f"and {test_count}; --test-fraction sets the fraction to hold out for testing (0: "
            "no test), --test-data names other images"
        )


def _check_shape(option, images, train_set):
    """Raise UserError if the images differ in shape from the training images."""
    if images.image_shape != train_set.image_shape:
        raise UserError(
            f"{option}: expected images of shape {train_set.image_shape}, as in --data, found "
            f"{images.image_shape}"
        )
