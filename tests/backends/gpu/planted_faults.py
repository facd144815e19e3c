"""The faults in convolution kernels that test_gpu_faults.py plants, and the class Fault."""

from typing import NamedTuple

from test_conformance import check_on_gpu

BARRIER = "__syncthreads();"


class Fault(NamedTuple):
    """A fault: if `old` is replaced by `new` in a kernel file, check(device, *arguments) fails."""

    family: str
    description: str
    old: str
    new: str
    check: object
    arguments: tuple = ()


def faults(family, check, *arguments, edits):
    """Convert {description: (old, new)} to a list of faults that one check must detect."""
    return [Fault(family, name, *edit, check, arguments) for name, edit in edits.items()]


def check_convolution(device, label, direct=False):
    """Check that a convolution and its gradients match the reference."""
    names = f"conv2d, {label}", f"conv2d_backward, {label}"
    check_on_gpu(device, *names, precision="fp32", direct=direct)


def check_first_layer(device):
    """Check a convolution of images of three channels in bfloat16."""
    label = "3x3 of three channels, bf16"
    check_on_gpu(device, f"conv2d, {label}", f"conv2d_backward, {label}", precision="bf16")


CONVOLUTION_FAULTS = [
    *faults(
        "conv_gemm",
        check_convolution,
        "many steps",
        edits={
            "no barrier in the main loop": (
                f"{BARRIER}  // the step has arrived",
                "// the step has arrived",
            ),
            "no barrier before the rows are read": (
                f"{BARRIER}\n\n    const int chunk",
                "const int chunk",
            ),
            "waits for one group of copies too few": (
                "cp_wait<STAGES - 2>();",
                "cp_wait<STAGES - 1>();",
            ),
            "copies of the main loop are not committed": (
                "stage - 1);\n        cp_commit();",
                "stage - 1);",
            ),
            "a step overwrites memory that others still read": (
                "load(next, stage == 0 ? STAGES - 1 : stage - 1)",
                "load(next, stage)",
            ),
            "pixels outside the image are read": (
                "(u32)(row.w + w_by) < (u32)W;\n            const long long at",
                "true;\n            const long long at",
            ),
            "elements after the last of k are added": (
                "const bool is_inside = k < depth;",
                "const bool is_inside = true;",
            ),
            "a matrix is read without its permutation": (
                "of_b = place(wn + (lane >> 4) * 8 + (lane & 7), (lane >> 3 & 1) * 4);",
                "of_b = (wn + (lane >> 4) * 8 + (lane & 7)) * WORDS + (lane >> 3 & 1) * 4;",
            ),
            "rows after the last are written": ("m >= 0 && m < rows;", "m >= 0;"),
            "one product of 3xTF32 is missing": (
                "mma_tf32(sum[i][j], of_m, low_of_n[j]);",
                ";",
            ),
            "no barrier before the tile overwrites the steps": (
                f"cp_wait<0>();\n    {BARRIER}",
                "cp_wait<0>();",
            ),
            "no barrier before the tile is stored": (
                f"{BARRIER}\n#if SPLITS > 1",
                "\n#if SPLITS > 1",
            ),
        },
    ),
    Fault(
        family="conv_gemm",
        description="a class has the taps of another",
        old="(remainder + before - first * dilation) % stride",
        new="(remainder - first * dilation) % stride",
        check=check_convolution,
        arguments=("few rows",),
    ),
    Fault(
        family="conv_gemm",
        description="no barrier before the moments of a tile are computed",
        old=f"{BARRIER}  // the tile holds what is stored",
        new="// the tile holds what is stored",
        check=check_on_gpu,
        arguments=("conv2d_moments, 3x3",),
    ),
    Fault(
        family="conv_gemm",
        description="no barrier before the moments of a column are merged",
        old=f"{BARRIER}\n        const int part =",
        new="const int part =",
        check=check_on_gpu,
        arguments=("conv2d_moments, 3x3",),
    ),
    Fault(
        family="conv_gemm",
        description="padding is normalized",
        old="v.at[e] = ok ? activated(v.at[e], source, norm, e) : 0.f;",
        new="v.at[e] = activated(v.at[e], source, norm, e);",
        check=check_on_gpu,
        arguments=("conv2d_moments, 3x3",),
    ),
    *faults(
        "conv_dweight",
        check_convolution,
        "many steps",
        edits={
            "no barrier in the main loop": (
                f"change(step, stage);\n        {BARRIER}",
                "change(step, stage);",
            ),
            "columns are permuted as rows are": ("wn + NJ * g;", "wn + 4 * g;"),
        },
    ),
    Fault(
        family="conv_dweight",
        description="no barrier before warps add shared sums",
        old=f"{BARRIER}\n#pragma unroll\n            for (int other",
        new="\n#pragma unroll\n            for (int other",
        check=check_convolution,
        arguments=("few rows",),
    ),
    Fault(
        family="conv_dweight",
        description="pixels of another tap",
        old="pq - p * Q) * shape[9] + along",
        new="pq - p * Q) * shape[8] + along",
        check=check_convolution,
        arguments=("few rows",),
    ),
    Fault(
        family="conv_dweight",
        description="the channel of zeros has a gradient",
        old="if (at < MD && !is_extra)",
        new="if (at < MD)",
        check=check_first_layer,
    ),
    *faults(
        "conv_weights",
        check_convolution,
        "many steps",
        edits={
            "no barrier before the tile is read": (BARRIER, ""),
            "the tile is not transposed": ("tile[k - k0][c - c0]", "tile[c - c0][k - k0]"),
        },
    ),
    Fault(
        family="conv_weights",
        description="no room for the channel of zeros",
        old="tap) * CE + c;",
        new="tap) * CG + c;",
        check=check_first_layer,
    ),
    *faults(
        "conv_direct",
        check_convolution,
        "3x3",
        True,
        edits={
            "no barrier between loading operands and adding products": (
                f"{BARRIER}\n        add_product(chunk, sums);",
                "add_product(chunk, sums);",
            ),
            "no barrier before the tap is read": (
                f"{BARRIER}\n        Tap tap = taps[lane];",
                "Tap tap = taps[lane];",
            ),
            "pixels to the right of the image are read": ("w >= 0 && w < W", "w >= 0"),
        },
    ),
    Fault(
        family="conv_direct",
        description="pixels between strides are added",
        old="place * stride == moved && place < outputs",
        new="place < outputs",
        check=check_convolution,
        arguments=("3x3 by 2", True),
    ),
    Fault(
        family="conv_direct",
        description="a leaf has filters of another group",
        old="K + group * filters + filter) * width",
        new="K + filter) * width",
        check=check_convolution,
        arguments=("unequal in both directions", True),
    ),
    *faults(
        "conv_depthwise",
        check_convolution,
        "depthwise 3x3 by 2",
        edits={
            "no barrier before the sums of threads are read": (
                f"sum[j][k];\n            {BARRIER}",
                "sum[j][k];",
            ),
            "no barrier before sums that others still read are overwritten": (
                f"{BARRIER}  // the sums of",
                "// the sums of",
            ),
            "pixels to the right of the image are read": ("u >= 0 && v < across.size", "u >= 0"),
            "pixels between strides are added": ("&& u % across.stride", "&& false"),
        },
    ),
]
