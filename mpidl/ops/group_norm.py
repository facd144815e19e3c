"""Normalization within an image: layer, group and instance normalization ops."""

from __future__ import annotations

from typing import Any, Literal

from mpidl import backends
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Array, Needs
from mpidl.ops import check

__all__ = ["group_norm", "instance_norm", "layer_norm"]


def check_epsilon(name: str, epsilon: Any) -> None:
    """Raise ValueError unless `epsilon` is a number > 0."""
    if not (check.are_numbers(epsilon) and epsilon > 0):
        raise ValueError(f"{name}: epsilon must be a number > 0, got {epsilon!r}")


def check_over(name: str, over: Any) -> None:
    """Raise ValueError unless `over` is "channels" or "image", as `layer_norm` requires."""
    if over not in ("channels", "image"):
        raise ValueError(f"{name}: over must be 'channels' or 'image', got {over!r}")


def check_groups(name: str, groups: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `groups` divides the channels of an image of this shape."""
    check.integer(name, "groups", groups)
    if shape[0] % groups:
        raise ValueError(f"{name}: {groups} groups do not divide the {shape[0]} channels")
    if shape[0] == groups and all(size == 1 for size in shape[1:]):
        raise ValueError(
            f"{name}: expected more than one number per group, got images {shape} and {groups} "
            "groups: a single number is always normalized to 0"
        )


def _normalized(
    name: str,
    x: Blocked,
    gamma: Array | None,
    beta: Array | None,
    groups: int | None,
    epsilon: float,
    shape: tuple[int, ...],
) -> WithVjp[Blocked]:
    """Return the backend's `group_norm` and its vjp. `shape` is that of gamma and beta."""
    check_epsilon(name, epsilon)
    shapes = tuple(None if v is None else tuple(v.shape) for v in (gamma, beta))
    if shapes not in ((None, None), (shape, shape)):
        raise ValueError(
            f"{name}: expected gamma and beta {shape} for x {x.shape}, or neither of them, got "
            f"{shapes[0]} and {shapes[1]}"
        )
    backend, lanes = backends.of_value(x), x.raw
    y, statistics = backend.group_norm(lanes, gamma, beta, groups, epsilon)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        of_all = (*needs, False, False)[:3]
        dx, *gradients = backend.group_norm_backward(
            dy.raw, lanes, gamma, statistics, groups, x.batch.tree, of_all
        )
        return (None if dx is None else x.like(dx), *gradients)[: len(needs)]

    return x.like(y), vjp


def _image(name: str, x: Blocked) -> tuple[int, ...]:
    """Return the shape of one image of x, (C, H, W) or (C,)."""
    check.images(name, x)
    if len(x.shape) not in (2, 4):
        raise ValueError(f"{name}: expected x of shape (N, C, H, W) or (N, C), got {x.shape}")
    return tuple(x.shape[1:])


@op(blocks=True)
def layer_norm(
    x: Blocked,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    over: Literal["channels", "image"] = "channels",
    epsilon: float = 1e-5,
) -> WithVjp[Blocked]:
    """Normalize each pixel over its channels, or each image: (x - mean) * rstd * gamma + beta.

    Parameters
    ----------
    x
        The input, (N, C, H, W) or (N, C).
    gamma, beta
        Scale and offset: of each channel, (C,), or of each element of an image, (C, H, W), if
        `over` is "image". Without them, the result is (x - mean) * rstd.
    over
        With "channels", the mean and the variance are those of the C numbers of a pixel, as in
        ConvNeXt. With "image", they are those of all numbers of an image.
    epsilon
        Constant added to the variance: rstd = 1 / sqrt(variance + epsilon). The variance is biased
        (divided by the count).

    Returns
    -------
    Blocked
        The normalized value, with the shape of x; a Var during differentiation.

    Raises
    ------
    ValueError
        If gamma or beta has another shape, or an argument is invalid.

    Notes
    -----
    See Ba, Kiros and Hinton, "Layer normalization", 2016, arXiv:1607.06450.
    """
    image = _image("layer_norm", x)
    check_over("layer_norm", over)
    is_per_pixel = over == "channels" or len(image) == 1
    groups, shape = (None, image[:1]) if is_per_pixel else (1, image)
    return _normalized("layer_norm", x, gamma, beta, groups, epsilon, shape)


@op(blocks=True)
def group_norm(
    x: Blocked,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    groups: int,
    epsilon: float = 1e-5,
) -> WithVjp[Blocked]:
    """Normalize groups of channels of each image: (x - mean) * rstd * gamma + beta.

    Parameters
    ----------
    x
        The input, (N, C, H, W) or (N, C).
    gamma, beta
        Scale and offset of each channel, (C,). Without them, the result is (x - mean) * rstd.
    groups
        Number of groups of adjacent channels, a divisor of C. The mean and the variance are those
        of the channels and pixels of a group of an image.
    epsilon
        Constant added to the variance: rstd = 1 / sqrt(variance + epsilon). The variance is biased
        (divided by the count).

    Returns
    -------
    Blocked
        The normalized value, with the shape of x; a Var during differentiation.

    Raises
    ------
    ValueError
        If `groups` does not divide C, a group has a single number, or gamma or beta has another
        shape.

    Notes
    -----
    See Wu and He, "Group normalization", 2018, arXiv:1803.08494.
    """
    image = _image("group_norm", x)
    check_groups("group_norm", groups, image)
    return _normalized("group_norm", x, gamma, beta, int(groups), epsilon, image[:1])


@op(blocks=True)
def instance_norm(
    x: Blocked,
    gamma: Array | None = None,
    beta: Array | None = None,
    *,
    epsilon: float = 1e-5,
) -> WithVjp[Blocked]:
    """Normalize each channel of each image: (x - mean) * rstd * gamma + beta.

    Parameters
    ----------
    x
        The input, (N, C, H, W), with more than one pixel.
    gamma, beta
        Scale and offset of each channel, (C,). Without them, the result is (x - mean) * rstd.
    epsilon
        Constant added to the variance: rstd = 1 / sqrt(variance + epsilon). The variance is biased
        (divided by the count).

    Returns
    -------
    Blocked
        The normalized value, with the shape of x; a Var during differentiation.

    Raises
    ------
    ValueError
        If images have a single pixel, or gamma or beta has another shape.

    Notes
    -----
    See Ulyanov, Vedaldi and Lempitsky, "Instance normalization", 2016, arXiv:1607.08022.
    """
    image = _image("instance_norm", x)
    check_groups("instance_norm", image[0], image)
    return _normalized("instance_norm", x, gamma, beta, image[0], epsilon, image[:1])
