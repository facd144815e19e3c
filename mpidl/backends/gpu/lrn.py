"""Compute cross-channel (local response) normalization with kernels/cuda/lrn.cu."""

from mpidl.backends import shapes
from mpidl.backends.gpu import activation, array, launching, pool
from mpidl.backends.gpu.join import rows_and_channels
from mpidl.backends.gpu.launching import THREADS

SHARED = 48 << 10  # bytes of shared memory that a thread block may use on any GPU


def _numbers(x, norm):
    """Return the scalar arguments that both kernels have.

    The arguments are the number of pixels, the number of channels, the number of channels before
    and after the centre of the window, alpha / window, and k.
    """
    window, alpha, _, k = norm
    rows, channels = rows_and_channels("cross_channel_norm", x)
    channels_before, channels_after = (
        min(side, channels - 1) for side in shapes.channel_window(window)
    )
    return rows, channels, channels_before, channels_after, alpha / window, k


def cross_channel_norm(x, norm):
    numbers = _numbers(x, norm)
    y = array.empty_like(x)
    blocks = launching.blocks_of_threads(x.size)
    launching.launch("lrn", blocks, THREADS, x, y, *numbers, norm.beta)
    return y


def cross_channel_norm_dx(dy, x, norm):
    numbers = _numbers(x, norm)
    rows, channels, channels_before, channels_after = numbers[:4]
    if channels_before + channels_after > SHARED // 8:
        raise ValueError(
            f"cross_channel_norm: on a GPU a window has at most {SHARED // 8} channels, got "
            f"{channels_before + 1 + channels_after}"
        )
    width = min(channels, 4 * THREADS)
    height = max(1, 4 * THREADS // width)
    height = max(1, min(height, SHARED // 4 // (width + channels_before + channels_after)))
    dx, grid = array.empty_like(x), (-(-rows // height), -(-channels // width))
    shared = 4 * height * (width + channels_before + channels_after)
    slope = 2 * norm.alpha * norm.beta / norm.window
    numbers = *numbers, norm.beta, slope, height, width
    launching.launch("lrn_dx", grid, THREADS, dy, x, dx, *numbers, shared=shared)
    return dx


def norm_max_pool(x, norm, windows):
    return pool.max_pool2d(cross_channel_norm(x, norm), windows)


def norm_max_pool_relu_dx(dy, argmax, x, norm, windows):
    dnorm, _ = pool.max_pool2d_dx(dy, argmax, x, windows, None)
    return activation.relu_dx(cross_channel_norm_dx(dnorm, x, norm), x)
