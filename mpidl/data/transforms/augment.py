"""Random augmentation of images, and of targets that are label maps or images.

The transformation of an image depends only on the seed, the epoch and the sample index. It does
not depend on the number of ranks or threads, or on earlier reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.erasing import Erasing
from mpidl.data.transforms.jitter import ColourJitter
from mpidl.data.transforms.movement import Movement
from mpidl.data.transforms.options import AugmentationOptions, changed_augmentation
from mpidl.data.transforms.posterizing import Posterizing
from mpidl.errors import UserError
from mpidl.options.declaration import declared, numbers_of, rule_of


@dataclass(frozen=True, kw_only=True, repr=False)
class Augmenter(Erasing, Posterizing, ColourJitter, Movement):  # from the last part to the first
    """Random transformations of images, similar to MATLAB's imageDataAugmenter.

    Reflection, rotation, scaling, shear and translation are applied in this order about the image's
    centre, followed by the crop, the colour changes, posterizing and erasing. x points right and y
    points down. Each parameter is drawn uniformly from its range (low, high); translations are
    whole numbers. For a range of degrees, pixels or hues, a single number r means (-r, r). For
    brightness, contrast and saturation, it means (max(0, 1 - r), 1 + r).

    Parameters
    ----------
    reflect_x, reflect_y : bool
        Whether to mirror images left to right or top to bottom, each with probability 1/2.
    alternating : bool
        Whether an image is mirrored in every other epoch instead of at random. Its first
        orientation is random. If both reflections are enabled, each image has each of the four
        orientations once in four epochs.
    rotation : (float, float) or float
        Range of the angle in degrees, clockwise.
    scale : (float, float)
        Range of the scale factor for both directions.
    scale_x, scale_y : (float, float)
        Range of an additional scale factor for one direction.
    shear_x, shear_y : (float, float) or float
        Range of the shear angle in degrees, between -90 and 90. shear_x moves each row to the right
        by the tangent of the angle times the row's distance below the centre. shear_y moves columns
        down in the same way.
    translate_x, translate_y : (int, int) or int
        Range of the shift in whole pixels, to the right and down.
    crop : (int, int), optional
        (height, width) of a window cut at a random position. Images that are not augmented, such as
        validation images, are cropped in the centre.
    resized_crop : (int, int), optional
        (height, width) to which a window of random area and aspect ratio is resized, instead of
        `crop`. Images that are not augmented are cropped to this size in the centre.
    crop_area : (float, float)
        Range of the area of the `resized_crop` window, as a fraction of the image's area.
    crop_aspect : (float, float)
        Range of the window's width divided by its height. The logarithm of the ratio is uniform.
    brightness, contrast, saturation : (float, float) or float
        Range of the factor. `jitter.jittered` documents the order and the formulas.
    hue : (float, float) or float
        Range of the rotation of the hue, as a fraction of a full turn, between -0.5 and 0.5.
    posterize : float
        Probability that an image keeps only the highest bits of each channel. Images are uint8.
    posterize_bits : int
        Number of bits that posterized images keep, from 1 to 8.
    erase : float
        Probability that a random rectangle of an image is erased.
    erase_area, erase_aspect : (float, float)
        Range of the erased rectangle's area, as a fraction of the image's area, and range of the
        rectangle's width divided by its height.
    erase_value : float, sequence of float or "noise"
        Replacement for the erased pixels: a single value, one value per channel, or uniform noise.
    fill : float or tuple of float
        Value of pixels outside the image (0 to 255 for uint8): a single value, or one value per
        channel.
    target_fill : float, optional
        Value of pixels outside targets that are images or label maps. The default for images is
        `fill`. The default for label maps is the ignored label of the loss, or 0 if no label is
        ignored.

    Raises
    ------
    UserError
        If a name is unknown or a range is invalid.

    Notes
    -----
    Reflections, translations and crops cost almost nothing compared with reading the image.
    Rotation, scaling and shear are combined into one affine map per image with bilinear
    interpolation, and uint8 results are rounded. Pillow resizes the windows of `resized_crop`. The
    host always computes resized crops, colour changes, posterizing and erasing. If there is a GPU,
    the host then uploads the results.

    Targets that are images or label maps move with their images (`apply_to_targets`). Colour
    changes, posterizing and erasing do not affect targets.

    Alternating flips: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, section 3.6.
    Random erasing: Zhong et al., "Random erasing data augmentation", 2020. Resized crops: Szegedy
    et al., "Going deeper with convolutions", 2015, section 6.
    """

    @classmethod
    def of_options(cls, options: AugmentationOptions) -> Augmenter | None:
        """Return the Augmenter that training options describe, or None if they describe none.

        Parameters
        ----------
        options : TrainingOptions
            The options. Those with the name of a parameter set this parameter.

        Returns
        -------
        Augmenter or None
            The augmenter.

        Raises
        ------
        UserError
            If the option `augmenter` is combined with options that describe an augmentation, such
            as `flip`, or if a value is invalid.
        """
        changed = changed_augmentation(options)
        if options.augmenter is not None:
            if not isinstance(options.augmenter, Augmenter):
                raise UserError(f"augmenter: expected an Augmenter, found {options.augmenter!r}")
            if changed:
                raise UserError(f"augmenter and {', '.join(changed)}: expected at most one of them")
            return options.augmenter
        if not changed:
            return None
        if options.flip_mode == "alternate" and options.flip == "none":
            raise UserError("--flip-mode alternate: expected --flip x, y or xy, found none")
        if options.random_crop is not None and options.resized_crop is not None:
            raise UserError("--random-crop and --resized-crop: expected at most one of them")
        values = {
            name: numbers_of(rule_of(declaration), value)
            for name, declaration in declared(AugmentationOptions).items()
            if (value := getattr(options, name)) is not None
        }
        if options.erase_value != "noise":
            values["erase_value"] = int(options.erase_value)
        shared = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        try:
            return cls(
                reflect_x="x" in options.flip,
                reflect_y="y" in options.flip,
                alternating=options.flip_mode == "alternate",
                shear_x=options.shear,
                shear_y=options.shear,
                translate_x=options.translate,
                translate_y=options.translate,
                crop=values.get("random_crop"),
                **shared,
            )
        except UserError as error:  # for example a scale whose range is reversed
            name, _, text = str(error).partition(":")
            raise UserError(f"--{name.replace('_', '-')}:{text}") from None

    def apply(
        self, images: np.ndarray, indices: np.ndarray, *, epoch: int = 0, seed: int = 0
    ) -> np.ndarray:
        """Augment images exactly as a `MinibatchQueue` with this augmenter does.

        Parameters
        ----------
        images : np.ndarray
            (n, C, H, W), uint8 or float.
        indices : np.ndarray
            Sample indices of the images, (n,).
        epoch, seed : int
            Epoch and seed. Together with `indices`, they determine the transformations.

        Returns
        -------
        np.ndarray
            (n, C, P, Q), uint8 or float32.
        """
        images = np.asarray(images)
        images = images if images.dtype == np.uint8 else images.astype(np.float32)
        self.check_images(images.shape[1:], images.dtype)
        return self.augmented(images, SampleKeys(np.asarray(indices), epoch, seed))

    def apply_to_targets(
        self,
        targets: np.ndarray,
        indices: np.ndarray,
        *,
        epoch: int = 0,
        seed: int = 0,
        fill: float = 0,
    ) -> np.ndarray:
        """Move targets in the same way as `apply` moves images with the same keys.

        Parameters
        ----------
        targets : ndarray
            Either label maps, int32 (n, H, W) or (n, C, H, W), sampled at the nearest pixel; or
            images, float32 (n, H, W) or (n, C, H, W), interpolated like the input images.
        indices, epoch, seed
            Keys of the transformations, as in `apply`.
        fill : float
            Value of pixels outside the targets. Ignored if the augmenter has a `target_fill`.

        Returns
        -------
        ndarray
            Targets (n, ..., P, Q) of the same type.
        """
        targets = np.asarray(targets)
        planes = targets[:, None] if targets.ndim == 3 else targets
        if targets.dtype.kind in "biu":  # labels, even if they have the type of pixels
            planes = planes.astype(np.int32)
        value = fill if self.target_fill is None else self.target_fill
        values = np.full(planes.shape[1], value, planes.dtype)
        moved = self._moved(planes, SampleKeys(np.asarray(indices), epoch, seed), values)
        return moved.reshape(*targets.shape[:-2], *moved.shape[2:]).astype(targets.dtype)
