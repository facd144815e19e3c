"""Cross-channel (local response) normalization."""

from mpidl import backends
from mpidl.autodiff.tape import op
from mpidl.ops import check


def check_window(name, window, alpha, beta, k):
    """ValueError for arguments that `cross_channel_norm` does not take."""
    check.whole(name, "window", window)
    if not (check.are_numbers(alpha, beta, k) and alpha >= 0 and beta >= 0 and k > 0):
        raise ValueError(
            f"{name}: expected alpha >= 0, beta >= 0 and k > 0, got {alpha!r}, {beta!r} and {k!r}"
        )


@op(blocks=True)
def cross_channel_norm(x, window, *, alpha=1e-4, beta=0.75, k=2.0):
    """y = x / (k + alpha / window * S)**beta, S the sum of x**2 over `window` channels around.

    x: (N, C, H, W) or (N, C); alpha, beta >= 0, k > 0. window: an integer >= 1; that of channel c
    has the channels c - (window - 1) // 2 to c + window // 2, as far as there are such. As MATLAB's
    crossChannelNormalizationLayer, which divides alpha by the window; so does PyTorch's
    LocalResponseNorm, whose even windows have the one more before.
    Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural
    networks", 2012, section 3.3, where alpha is not divided.
    """
    check.images("cross_channel_norm", x)
    check_window("cross_channel_norm", window, alpha, beta, k)
    backend, how = backends.of(x), (window, float(alpha), float(beta), float(k))
    lanes = x.lanes
    y = backend.cross_channel_norm(lanes, *how)

    def vjp(dy, needs):
        dx = backend.cross_channel_norm_dx(dy.lanes, lanes, *how)
        return (x.like(dx), None)[: len(needs)]

    return x.like(y), vjp
