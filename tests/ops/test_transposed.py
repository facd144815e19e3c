"""Test transposed convolution."""

import numpy as np
import pytest
from op_references import Case, OpChecks, torch_functions
from single_rank import all_images, blocked, numbers

import mpidl as dl
from mpidl.ops.check import as_pair


def transposed_reference(x, weight, bias, stride, crops):
    """Add each pixel of x, multiplied by the filters, to the output, and then crop the output."""
    (n, _, h, w), (_, k, r, s) = x.shape, weight.shape
    y = np.zeros((n, k, stride[0] * (h - 1) + r, stride[1] * (w - 1) + s))
    for i, j in np.ndindex(h, w):
        row, column = i * stride[0], j * stride[1]
        pixel = np.einsum("nc,ckrs->nkrs", x[:, :, i, j], weight)
        y[:, :, row : row + r, column : column + s] += pixel
    (top, bottom), (left, right) = crops
    y = y[:, :, top : y.shape[2] - bottom, left : y.shape[3] - right]
    return y + bias[:, None, None]


def transposed(image, weight, stride, cropping=0, crops=((0, 0), (0, 0))):
    return Case(
        lambda x, w, b: dl.transposed_conv2d(x, w, b, stride=stride, cropping=cropping),
        lambda x, w, b: transposed_reference(x, w, b, as_pair(stride), crops),
        [image],
        [weight, weight[1:2]],
    )


class TestTransposedConv(OpChecks):
    cases = {
        "2x2/2": transposed((3, 3, 4), (3, 2, 2, 2), 2),
        "same": transposed((2, 4, 3), (2, 3, 4, 4), 2, "same", ((1, 1), (1, 1))),
        "same, odd": transposed((2, 3, 3), (2, 3, 3, 5), 2, "same", ((0, 1), (1, 2))),
        "gaps": transposed((2, 3, 2), (2, 2, 2, 1), (3, 2)),
        "cropping": transposed((2, 4, 3), (2, 3, 5, 3), (2, 1), ((3, 1), (0, 2)), ((3, 1), (0, 2))),
    }
    errors = [
        (
            lambda x, f, i: dl.transposed_conv2d(x, np.ones((3, 2, 2, 2)), np.ones(2)),
            ValueError,
            r"expected weight \(2, K, R, S\), got weight \(3, 2, 2, 2\)",
        ),
        (
            lambda x, f, i: dl.transposed_conv2d(x, np.ones((2, 3, 2, 2)), np.ones(2)),
            ValueError,
            r"expected bias \(3,\), got \(2,\)",
        ),
        (
            lambda x, f, i: dl.transposed_conv2d(
                x, np.ones((2, 3, 2, 2)), np.ones(3), cropping="all"
            ),
            ValueError,
            "cropping must be",
        ),
    ]


@pytest.mark.parametrize("stride, cropping", [(1, 0), (2, 1), (3, 0), (2, (2, 1))])
def test_against_pytorch(world, stride, cropping):
    torch, functional = torch_functions()
    arrays = x, w, b = numbers("x", 20, 3, 4, 5), numbers("w", 3, 2, 5, 3), numbers("b", 2)
    expected = functional.conv_transpose2d(
        *map(torch.tensor, arrays), stride=stride, padding=cropping
    )
    y = dl.transposed_conv2d(blocked(world, x), w, b, stride=stride, cropping=cropping)
    np.testing.assert_allclose(all_images(world, y), expected.numpy(), rtol=1e-12)
