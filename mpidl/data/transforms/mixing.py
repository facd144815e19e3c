"""Mixup and CutMix: combine each image and its label with another image and label."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from mpidl.core.blocks import LANES
from mpidl.data.transforms import draws
from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.options import MIX, MIX_PROBABILITY, MixingOptions
from mpidl.errors import UserError
from mpidl.options.declaration import check_value

PURPOSE, PARTNER = "mixing", "mixing partner"
ATTEMPTS = 32  # number of attempts of `beta`


class MixPlan(NamedTuple):
    """A plan that tells how to combine the n images of a block."""

    partners: np.ndarray  # for each image, the position of the other image in the block, (n,) int64
    # Weight of the image's label, (n,) float64. The weight of the partner's label is 1 minus
    # this weight.
    weights: np.ndarray
    # (top, left, height, width) of the rectangle that comes from the partner, (n, 4) int64. All
    # are zero if all pixels are averaged with the weight.
    boxes: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mixup and CutMix of each training image with another image of its block of 16.

    Parameters
    ----------
    mixup : float
        Alpha of mixup, 0 or from 0.05 to 10. The result is w times the image plus (1 - w) times the
        other image, where w has the distribution Beta(alpha, alpha).
    cutmix : float
        Alpha of CutMix, 0 or from 0.05 to 10. A rectangle of the image is replaced by the same
        rectangle of the other image. The rectangle's area is (1 - w) times the image's area, minus
        the part outside the image. If both alphas are given, mixup or CutMix is selected at random
        for each image.
    probability : float
        Probability that an image is combined with another image.

    Raises
    ------
    UserError
        If a value is out of range, or both alphas are 0.

    Notes
    -----
    The label becomes the probabilities of two classes: w' for the image's class and 1 - w' for the
    other image's class. w' is w for mixup, and the fraction of remaining pixels for CutMix. The
    cross-entropy is w' times the cross-entropy of the first label plus (1 - w') times the
    cross-entropy of the second label.

    The other image is in the same block. A block lies on one rank, so no rank reads or sends
    additional images, and the result does not depend on the number of ranks. The order of an epoch
    is random, so blocks are random groups of images.

    Zhang et al., "mixup: beyond empirical risk minimization", 2018; Yun et al., "CutMix:
    regularization strategy to train strong classifiers with localizable features", 2019.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0

    def __post_init__(self) -> None:
        for name, rule in (("mixup", MIX), ("cutmix", MIX), ("probability", MIX_PROBABILITY)):
            check_value(rule, getattr(self, name), name)
        if not (self.mixup or self.cutmix):
            raise UserError("mixup and cutmix: expected a number above 0 for one of them")

    @classmethod
    def of_options(cls, options: MixingOptions) -> Mixing | None:
        """Return the Mixing that training options describe, or None if images are not mixed.

        Parameters
        ----------
        options : TrainingOptions
            The options.

        Returns
        -------
        Mixing or None
            The mixing.
        """
        if not (options.mixup or options.cutmix):
            return None
        return cls(mixup=options.mixup, cutmix=options.cutmix, probability=options.mix_probability)

    def spec(self) -> dict[str, Any]:
        """Return the arguments that differ from their defaults as {name: value}.

        Returns
        -------
        dict
            {name: value}
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def apply(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        samples: np.ndarray,
        classes: int,
        *,
        epoch: int = 0,
        seed: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Combine images and labels exactly as a `MinibatchQueue` with this mixing does.

        Parameters
        ----------
        images : ndarray
            Images (n, C, H, W), uint8 or float32, in the order of the mini-batch. Every 16
            consecutive images are a block.
        labels : ndarray
            Labels (n,), integers.
        samples : ndarray
            Sample numbers of the images, (n,).
        classes : int
            Number of classes K.
        epoch, seed : int
            Epoch and seed. Together with `samples`, they are the keys of the random numbers.

        Returns
        -------
        images : ndarray
            Combined images of the same shape and type. uint8 values are rounded.
        targets : ndarray
            Class probabilities, (n, K) float32.
        """
        out, targets = images.copy(), np.zeros((len(images), classes), np.float64)
        for first in range(0, len(images), LANES):
            block = slice(first, first + LANES)
            keys = SampleKeys(np.asarray(samples[block]), epoch, seed)
            plan = draw(self, keys, images.shape[1:])
            _combine(images[block], out[block], plan)
            rows = np.arange(first, first + len(plan.partners))
            block_labels = np.asarray(labels[block])
            np.add.at(targets, (rows, block_labels), plan.weights)
            np.add.at(targets, (rows, block_labels[plan.partners]), 1 - plan.weights)
        return out, targets.astype(np.float32)


def draw(mixing: Mixing, keys: SampleKeys, shape: tuple[int, ...]) -> MixPlan:
    """Draw the plan that combines the images (C, H, W) of one block, at most 16."""
    n, (height, width) = len(keys.indices), shape[1:]
    order = np.argsort(keys.words(PARTNER, 1)[:, 0], kind="stable")
    partners = np.empty(n, np.int64)
    partners[order] = np.roll(order, -1)  # one cycle through all n images
    u = draws.uniforms(keys, PURPOSE, 4 + 2 * ATTEMPTS)
    cuts = (u[1] < 0.5) if mixing.mixup and mixing.cutmix else np.full(n, bool(mixing.cutmix))
    alphas = mixing.mixup or mixing.cutmix, mixing.cutmix or mixing.mixup
    weights = np.where(cuts, *(beta(alpha, u[4:]) for alpha in alphas[::-1]))
    weights = np.where(u[0] < mixing.probability, weights, 1.0)
    boxes = np.zeros((n, 4), np.int64)
    side = np.sqrt(1 - weights)
    for axis, (extent, place) in enumerate(((height, u[2]), (width, u[3]))):
        half = np.floor(extent * side).astype(np.int64) / 2
        centre = np.floor(extent * place)
        first = np.clip(np.floor(centre - half), 0, extent)
        stop = np.clip(np.floor(centre + half), 0, extent)
        boxes[:, axis], boxes[:, 2 + axis] = first, stop - first
    boxes *= cuts[:, None]
    area = boxes[:, 2] * boxes[:, 3]
    return MixPlan(partners, np.where(cuts, 1 - area / (height * width), weights), boxes)


def beta(alpha: float, u: np.ndarray) -> np.ndarray:
    """Return numbers (n,) with the distribution Beta(alpha, alpha), from uniform numbers (2 *
    attempts, n) in [0, 1). A number is 1/2 if no attempt succeeded. The method is Jöhnk's for alpha
    below 1, and rejection from the uniform distribution otherwise. The bits of the result do not
    depend on the C library.
    """
    result, is_missing = np.full(u.shape[1], 0.5), np.ones(u.shape[1], bool)
    for first, second in u.reshape(-1, 2, u.shape[1]):
        if alpha < 1:
            x, y = draws.power(first, 1 / alpha), draws.power(second, 1 / alpha)
            total = x + y
            accepted = (total > 0) & (total <= 1)
            value = x / np.where(accepted, total, 1.0)
        else:
            value = first
            accepted = second <= draws.power(4 * first * (1 - first), alpha - 1)
        result = np.where(is_missing & accepted, value, result)
        is_missing &= ~accepted
        if not is_missing.any():
            break
    return result


def _combine(images, out, plan):
    """Combine the images of a block, and write the results to `out`."""
    for i, (partner, weight, box) in enumerate(zip(*plan, strict=True)):
        top, left, height, width = box.tolist()
        if height and width:
            rows, columns = slice(top, top + height), slice(left, left + width)
            out[i][:, rows, columns] = images[partner][:, rows, columns]
        elif weight != 1 and partner != i:
            first, second = np.float32(weight), np.float32(1 - weight)
            mixture = images[i] * first + images[partner] * second
            is_bytes = out.dtype == np.uint8
            out[i] = np.floor(mixture + np.float32(0.5)) if is_bytes else mixture
