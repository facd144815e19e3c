"""The ops that select and reorder channels, and their gradients."""

from __future__ import annotations

from typing import Any

from mpidl import backends
from mpidl.core.blocks import Blocked
from mpidl.core.op import WithVjp, op
from mpidl.core.tape import Needs
from mpidl.ops import check

__all__ = ["channel_shuffle", "channel_slice"]


def _channels_of(name: str, x: Any) -> int:
    shape = check.images(name, x).image_shape
    if not shape:
        raise ValueError(f"{name}: expected images or features, got x of shape {x.shape}")
    return shape[0]


def check_groups(name: str, groups: Any, channels: int) -> None:
    """Raise ValueError unless the channels can be divided into this number of groups."""
    check.integer(name, "groups", groups)
    if channels % groups:
        raise ValueError(f"{name}: groups must divide {channels} channels, got {groups}")


def check_slice(name: str, start: Any, stop: Any, channels: int) -> None:
    """Raise ValueError unless start and stop select at least one of the channels."""
    check.integer(name, "start", start, 0)
    check.integer(name, "stop", stop)
    if not start < stop <= channels:
        raise ValueError(
            f"{name}: expected start < stop <= {channels}, the number of channels, got "
            f"{start} and {stop}"
        )


def _take(x: Blocked, channels: list[int], back: list[int]) -> WithVjp[Blocked]:
    backend = backends.of_value(x)

    def vjp(dy: Blocked, needs: Needs) -> tuple[Any, ...]:
        return (x.like(backend.take_channels(dy.raw, back)), *(None,) * 2)[: len(needs)]

    return x.like(backend.take_channels(x.raw, channels)), vjp


@op(blocks=True)
def channel_shuffle(x: Blocked, groups: int) -> WithVjp[Blocked]:
    """Interleave groups of channels.

    The first channels of all groups come first, in the order of the groups, then the second
    channels, and so on. The channels are those of `x.reshape(N, groups, C // groups, H, W)` after
    the two axes of channels are exchanged. The op is described by Zhang et al., "ShuffleNet: An
    extremely efficient convolutional neural network for mobile devices", 2018.

    Parameters
    ----------
    x
        Images (N, C, H, W), or features (N, C).
    groups
        Number of groups, a divisor of C.

    Returns
    -------
    Blocked
        The value with its channels in another order, in the shape of x.
    """
    channels = _channels_of("channel_shuffle", x)
    check_groups("channel_shuffle", groups, channels)
    return _take(x, _interleaved(channels, groups), _interleaved(channels, channels // groups))


def _interleaved(channels: int, groups: int) -> list[int]:
    size = channels // groups
    return [group * size + i for i in range(size) for group in range(groups)]


@op(blocks=True)
def channel_slice(x: Blocked, start: int, stop: int) -> WithVjp[Blocked]:
    """Return the channels from `start` to before `stop`.

    Parameters
    ----------
    x
        Images (N, C, H, W), or features (N, C).
    start, stop
        The first channel, and the channel after the last, with 0 <= start < stop <= C.

    Returns
    -------
    Blocked
        The channels, (N, stop - start, H, W) or (N, stop - start).
    """
    channels = _channels_of("channel_slice", x)
    check_slice("channel_slice", start, stop, channels)
    back = [-1] * start + list(range(stop - start)) + [-1] * (channels - stop)
    return _take(x, list(range(start, stop)), back)
