"""Test convolution with padding, strides, dilation and groups."""

import numpy as np
from op_references import Case, OpChecks
from single_rank import blocked, numbers

import mpidl as dl
from mpidl.core import tape
from mpidl.ops.check import as_pair


def conv2d_reference(x, weight, bias, stride, pads, dilation, groups):
    """Compute a convolution by its definition, one output pixel after another."""
    (top, bottom), (left, right) = pads
    n, c, h, w = x.shape
    k, share, r, s = weight.shape
    padded = np.zeros((n, c, h + top + bottom, w + left + right))
    padded[:, :, top : top + h, left : left + w] = x
    p = (h + top + bottom - dilation[0] * (r - 1) - 1) // stride[0] + 1
    q = (w + left + right - dilation[1] * (s - 1) - 1) // stride[1] + 1
    y = np.zeros((n, k, p, q))
    for out, i, j in np.ndindex(k, p, q):
        first = out // (k // groups) * share
        y[:, out, i, j] = bias[out]
        for channel, a, b in np.ndindex(share, r, s):
            row, column = i * stride[0] + a * dilation[0], j * stride[1] + b * dilation[1]
            y[:, out, i, j] += padded[:, first + channel, row, column] * weight[out, channel, a, b]
    return y


def same_pads(image, filters, stride, dilation):
    """Return the padding for which the output has ceil(size / stride) pixels."""
    pads = []
    for n, taps, step, gap in zip(image, filters, stride, dilation, strict=True):
        missing = max(0, (-(-n // step) - 1) * step + (taps - 1) * gap + 1 - n)
        pads.append((missing // 2, (missing + 1) // 2))
    return tuple(pads)


def convolution(image, weight, stride=1, padding=0, dilation=1, groups=1):
    strides, dilations = as_pair(stride), as_pair(dilation)
    if padding == "same":
        pads = same_pads(image[1:], weight[2:], strides, dilations)
    else:
        pads = tuple(as_pair(side) for side in as_pair(padding))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return Case(
        lambda x, w, b: dl.conv2d(x, w, b, **options),
        lambda x, w, b: conv2d_reference(x, w, b, strides, pads, dilations, groups),
        [image],
        [weight, weight[:1]],
    )


class TestConv(OpChecks):
    cases = {
        "plain": convolution((4, 5, 6), (3, 4, 3, 3)),
        "one by one": convolution((3, 4, 3), (5, 3, 1, 1)),
        "padding": convolution((2, 4, 5), (3, 2, 3, 3), padding=1),
        "stride, pixels left over": convolution((2, 6, 8), (3, 2, 3, 3), stride=(2, 3)),
        "asymmetric padding": convolution((2, 3, 4), (3, 2, 2, 3), padding=((0, 2), (3, 1))),
        "dilation": convolution((2, 6, 7), (2, 2, 3, 2), dilation=(2, 3)),
        "groups": convolution((4, 4, 4), (6, 2, 3, 3), groups=2, padding=(1, 0)),
        "by channel": convolution((3, 4, 4), (6, 1, 3, 3), groups=3),
        "all at once": convolution(
            (4, 7, 6), (4, 2, 3, 2), (2, 1), ((1, 2), (0, 1)), dilation=(1, 2), groups=2
        ),
        "same": convolution((2, 4, 5), (3, 2, 3, 3), 1, "same"),
        "same, even filters": convolution((2, 4, 5), (3, 2, 2, 4), 1, "same"),
        "same, strides": convolution((2, 7, 6), (3, 2, 3, 4), (2, 3), "same"),
        "same, strides above the filter": convolution((2, 7, 6), (3, 2, 2, 1), (4, 2), "same"),
        "same, dilation": convolution((1, 6, 7), (2, 1, 3, 2), (1, 2), "same", dilation=(2, 3)),
    }
    last_block_sizes = (1, 7, 8, 15)  # the reference is slow
    errors = [
        (
            lambda x, f, i: dl.conv2d(f, np.ones((2, 3, 1, 1)), np.ones(2)),
            ValueError,
            "conv2d: exp",
        ),
        (
            lambda x, f, i: dl.conv2d(x, np.ones((2, 3, 1, 1)), np.ones(2)),
            ValueError,
            r"\(K, 2/gro",
        ),
        (lambda x, f, i: dl.conv2d(x, np.ones((2, 2, 1, 1)), np.ones(3)), ValueError, r"bias \(2,"),
        (
            lambda x, f, i: dl.conv2d(x, np.ones((2, 2, 5, 1)), np.ones(2)),
            ValueError,
            "leave no output",
        ),
        (
            lambda x, f, i: dl.conv2d(x, np.ones((2, 2, 1, 1)), np.ones(2), stride=0),
            ValueError,
            "stride must be one or two integers >= 1",
        ),
        (
            lambda x, f, i: dl.conv2d(x, np.ones((2, 2, 1, 1)), np.ones(2), padding=(1, 2, 3)),
            ValueError,
            "padding must be",
        ),
        (
            lambda x, f, i: dl.conv2d(np.ones(3), None, None),
            TypeError,
            "expected a value per image",
        ),
    ]


def test_the_first_layer_computes_no_gradient_of_the_images(world, monkeypatch):
    from mpidl.backends.reference import conv

    monkeypatch.setattr(conv, "conv2d_dx", None)  # a call would fail
    x = blocked(world, numbers("images", 20, 2, 4, 4))
    w, b = dl.Var(numbers("w", 3, 2, 3, 3)), dl.Var(np.zeros(3))
    y = dl.conv2d(x, w, b)
    assert set(tape.backward(y, y.value)) == {w, b}
