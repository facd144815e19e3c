"""Random augmentation of images, and of targets that are label maps or images.

The transformation of an image depends only on the seed, the epoch and the sample index. It does
not depend on the number of ranks or threads, or on earlier reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpidl import backends
from mpidl.backends.reference.images import windows as moved_windows
from mpidl.data.transforms import draws, erasing, jitter, resized_crop
from mpidl.data.transforms.augmenter_options import AugmenterOptions
from mpidl.data.transforms.image_targets import nearest_warp
from mpidl.data.transforms.options import AugmentationOptions, changed_augmentation
from mpidl.errors import UserError
from mpidl.options.declaration import declared, numbers_of, rule_of

PURPOSE = "augment"  # this string is one of the keys of the random numbers
ALTERNATE, JITTER = "alternating flips", "colour jitter"
DRAWS = 12  # random numbers drawn per image, including unused numbers


class TransformParameters(NamedTuple):
    """Transformation parameters of n images, as arrays (n,). See `Augmenter` for their meaning."""

    reflect_x: np.ndarray  # bool
    reflect_y: np.ndarray
    rotation: np.ndarray  # degrees
    scale_x: np.ndarray
    scale_y: np.ndarray
    shear_x: np.ndarray  # degrees
    shear_y: np.ndarray
    translate_x: np.ndarray  # whole pixels
    translate_y: np.ndarray
    top: np.ndarray  # first row and column of the crop, whole pixels
    left: np.ndarray


@dataclass(frozen=True, kw_only=True, repr=False)
class Augmenter(AugmenterOptions):
    """Random transformations of images, similar to MATLAB's imageDataAugmenter.

    Reflection, rotation, scaling, shear and translation are applied in this order about the image's
    centre, followed by the crop, the colour changes and the erasing. x points right and y points
    down. Each parameter is drawn uniformly from its range (low, high); translations are whole
    numbers. For a range of degrees, pixels or hues, a single number r means (-r, r). For
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
    **keywords
        The parameters above. Each parameter is optional.

    Raises
    ------
    UserError
        If a name is unknown or a range is invalid.

    Notes
    -----
    Reflections, translations and crops cost almost nothing compared with reading the image.
    Rotation, scaling and shear are combined into one affine map per image with bilinear
    interpolation, and uint8 results are rounded. Pillow resizes the windows of `resized_crop`. The
    host always computes resized crops, colour changes and erasing. If there is a GPU, the host then
    uploads the results.

    Targets that are images or label maps move with their images (`apply_to_targets`). Colour
    changes and erasing do not affect targets.

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
            The options.

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
        declarations = declared(AugmentationOptions)
        values = {name: getattr(options, name) for name in declarations}
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
        numbers = {
            name: numbers_of(rule_of(declarations[name]), value)
            for name, value in values.items()
            if value is not None
        }
        if options.erase_value != "noise":
            numbers["erase_value"] = int(options.erase_value)
        shared = {
            name: value for name, value in numbers.items() if name in cls.__dataclass_fields__
        }
        try:
            return cls(
                reflect_x="x" in options.flip,
                reflect_y="y" in options.flip,
                alternating=options.flip_mode == "alternate",
                shear_x=options.shear,
                shear_y=options.shear,
                translate_x=options.translate,
                translate_y=options.translate,
                crop=numbers.get("random_crop"),
                **shared,
            )
        except UserError as error:  # for example a scale whose range is reversed
            name, _, text = str(error).partition(":")
            raise UserError(f"--{name.replace('_', '-')}:{text}") from None

    def draw(
        self, seed: int, epoch: int, indices: np.ndarray, shape: Sequence[int]
    ) -> TransformParameters:
        """Draw the transformations of some samples.

        Parameters
        ----------
        seed : int
            Seed of the run.
        epoch : int
            Epoch, from 1.
        indices : ndarray
            Numbers of the samples, (n,).
        shape : tuple of int
            Shape (C, H, W) of the images.

        Returns
        -------
        TransformParameters
            Arrays (n,) of angles, factors, shifts and reflections.
        """
        u = draws.uniforms(seed, PURPOSE, DRAWS, epoch, indices)
        # The windows of `resized_crop` are drawn separately.
        _, p, q = shape if self.crop is None else self.image_shape(shape)

        def uniform(low_high, u):
            return draws.between(low_high[0], low_high[1], u)

        def pixels(low_high, u):
            low, high = (int(edge) for edge in low_high)
            return low + np.floor((high - low + 1) * u).astype(np.int32)

        scale = uniform(self.scale, u[3])
        is_mirrored = u[:2] < 0.5
        if self.alternating:
            is_mirrored = draws.uniforms(seed, ALTERNATE, 2, 0, indices) < 0.5
            turns = epoch, epoch // 2 if self.reflect_x else epoch
            is_mirrored ^= np.array([[turns[0] % 2 == 1], [turns[1] % 2 == 1]])
        return TransformParameters(
            is_mirrored[0] & self.reflect_x,
            is_mirrored[1] & self.reflect_y,
            uniform(self.rotation, u[2]),
            scale * uniform(self.scale_x, u[4]),
            scale * uniform(self.scale_y, u[5]),
            uniform(self.shear_x, u[6]),
            uniform(self.shear_y, u[7]),
            pixels(self.translate_x, u[8]),
            pixels(self.translate_y, u[9]),
            pixels((0, shape[1] - p), u[10]),
            pixels((0, shape[2] - q), u[11]),
        )

    def moves(
        self, seed: int, epoch: int, indices: np.ndarray, shape: Sequence[int]
    ) -> dict[str, np.ndarray]:
        """Return keyword arguments for `Backend.images` that mirror, shift and crop images.

        Call this method only if `only_moves` is True.

        Parameters
        ----------
        seed : int
            Seed of the run.
        epoch : int
            Epoch, from 1.
        indices : ndarray
            Numbers of the samples, (n,).
        shape : tuple of int
            Shape (C, H, W) of the images.

        Returns
        -------
        dict
            "mirrored", "top" and "left", each int32 (n,). "mirrored" is 1 for left to right, 2 for
            top to bottom, 3 for both and 0 for neither. "top" and "left" are the row and column of
            the image where the result starts.
        """
        d = self.draw(seed, epoch, indices, shape)
        return {
            "mirrored": (d.reflect_x + 2 * d.reflect_y).astype(np.int32),
            "top": d.top - d.translate_y,
            "left": d.left - d.translate_x,
        }

    def affine_maps(
        self, seed: int, epoch: int, indices: np.ndarray, shape: Sequence[int]
    ) -> np.ndarray:
        """Return an affine map per image, for `Backend.warp`.

        A map converts coordinates in the result to coordinates in the image.

        Parameters
        ----------
        seed : int
            Seed of the run.
        epoch : int
            Epoch, from 1.
        indices : ndarray
            Numbers of the samples, (n,).
        shape : tuple of int
            Shape (C, H, W) of the images.

        Returns
        -------
        ndarray
            Maps (n, 6), float64.
        """
        d = self.draw(seed, epoch, indices, shape)
        # Forward map, with (x, y) measured from the centre: shear * scale * rotation * reflection,
        # then the shift. `draws` computes sine and cosine with the same bits on all processors.
        sine, cosine = draws.sine_cosine(d.rotation)
        across, down = draws.tangent(d.shear_x), draws.tangent(d.shear_y)
        fx, fy = 1.0 - 2.0 * d.reflect_x, 1.0 - 2.0 * d.reflect_y
        a, b = d.scale_x * (cosine * fx), d.scale_x * (-sine * fy)
        c, e = d.scale_y * (sine * fx), d.scale_y * (cosine * fy)
        # Both shears use the scaled coordinates: x moves in proportion to y, and y to x.
        a, b, c, e = a + across * c, b + across * e, c + down * a, e + down * b
        determinant = a * e - b * c
        m0, m1, m3, m4 = e / determinant, -b / determinant, -c / determinant, a / determinant
        # Column q of the result has x = q + left - shift - centre in the transformed image.
        cx, cy = (shape[2] - 1) / 2, (shape[1] - 1) / 2
        x, y = d.left - d.translate_x - cx, d.top - d.translate_y - cy
        return np.stack(
            [m0, m1, m0 * x + m1 * y + cx, m3, m4, m3 * x + m4 * y + cy],
            axis=1,
        )

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
        images, indices = np.asarray(images), np.asarray(indices)
        images = images if images.dtype == np.uint8 else images.astype(np.float32)
        shape = images.shape[1:]
        fill = self.fill_values(shape, images.dtype)
        images = self._moved(images, indices, epoch, seed, fill)
        if self.jitters:
            self.check_colours(shape)
            images = jitter.jittered(images, self.colours(seed, epoch, indices))
        if self.erase:
            rectangles = erasing.rectangles(
                seed,
                epoch,
                indices,
                images.shape[2:],
                probability=self.erase,
                area=self.erase_area,
                aspect=self.erase_aspect,
            )
            value = self.erase_values(shape, images.dtype)
            images = erasing.erase(images, rectangles, value, seed, epoch, indices)
        return images

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
        targets, indices = np.asarray(targets), np.asarray(indices)
        planes = targets[:, None] if targets.ndim == 3 else targets
        if targets.dtype.kind in "biu":  # labels, even if they have the type of pixels
            planes = planes.astype(np.int32)
        value = fill if self.target_fill is None else self.target_fill
        values = np.full(planes.shape[1], value, planes.dtype)
        moved = self._moved(planes, indices, epoch, seed, values).astype(targets.dtype, copy=False)
        return moved.reshape(*targets.shape[:-2], *moved.shape[2:])

    def _moved(self, images, indices, epoch, seed, fill):
        """Apply all transformations that move pixels, and return the images."""
        shape, is_labels = images.shape[1:], images.dtype.kind in "iu" and images.dtype != np.uint8
        if self.warps:
            size = self.image_shape(shape)[1:] if self.resized_crop is None else shape[1:]
            maps = self.affine_maps(seed, epoch, indices, shape)
            warp = nearest_warp if is_labels else backends.of_type(np.float32).warp
            images = warp(images, maps, size, fill)
        else:
            size = shape[1:] if self.resized_crop else self.image_shape(shape)[1:]
            moves = self.moves(seed, epoch, indices, shape)
            images = moved_windows(images, size, fill=fill, **moves)
        if self.resized_crop is not None:
            self.image_shape(shape)  # raises UserError
            ranges = self.crop_area, self.crop_aspect
            places = resized_crop.windows(seed, epoch, indices, images.shape[2:], *ranges)
            images = resized_crop.resized(images, places, self.resized_crop, is_labels)
        return images

    def colours(self, seed: int, epoch: int, indices: np.ndarray) -> jitter.ColourChange:
        """Draw the colour changes of some samples.

        Parameters
        ----------
        seed, epoch : int
            Seed and epoch.
        indices : ndarray
            Numbers of the samples, (n,).

        Returns
        -------
        ColourChange
            The colour changes.
        """
        u = draws.uniforms(seed, JITTER, 4, epoch, indices)
        ranges: list[Any] = [self.brightness, self.contrast, self.saturation, self.hue]
        drawn = [draws.between(r[0], r[1], v) for r, v in zip(ranges, u, strict=True)]
        return jitter.ColourChange(*drawn)
