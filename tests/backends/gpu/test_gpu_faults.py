"""Faults that are planted in the kernels are found by the tests of those kernels.

A kernel's test that would pass without a barrier, a bound or an order of sums proves little. Each
fault here is one edit of a kernel's text; the test named beside it must fail with it, in one of the
schedules of the emulated GPU at least, and passes without it.
"""

import functools
from typing import NamedTuple

import pytest
import test_gpu_dense as dense
import test_gpu_elementwise as elementwise
import test_gpu_ends as ends
import test_gpu_fold as fold
import test_gpu_layers as layers
import test_gpu_loss as loss
import test_gpu_solvers as solvers
import test_program as program
from emulator import opened
from test_conformance import check_on_gpu

from mpidl.backends.gpu import kernels

ORDERS = (0, 1, 2)


class Fault(NamedTuple):
    """In a family's text `old` becomes `new`; then check(device, *arguments) fails."""

    family: str
    what: str
    old: str
    new: str
    check: object
    arguments: tuple = ()


BARRIER = "__syncthreads();"


def convolves(device, label, direct=False):
    """A convolution and its gradients are those of the reference."""
    names = f"conv2d, {label}", f"conv2d_backward, {label}"
    check_on_gpu(device, *names, precision="fp32", direct=direct)


FAULTS = [
    Fault(
        "conv_gemm",
        "no barrier in the main loop",
        f"{BARRIER}  // the step has arrived",
        "// the step has arrived",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "no barrier before the rows are known",
        f"{BARRIER}\n\n    const int chunk",
        "const int chunk",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "one group of copies too few is waited for",
        "cp_wait<STAGES - 2>();",
        "cp_wait<STAGES - 1>();",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "copies of the main loop belong to no group",
        "stage - 1);\n        cp_commit();",
        "stage - 1);",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "a step is copied to where the others still read",
        "load(next, stage == 0 ? STAGES - 1 : stage - 1)",
        "load(next, stage)",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "pixels beside the image are read",
        "&& (u32)v < (u32)W;",
        ";",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "what lies behind the last element of k counts",
        "const bool inside = k < KD;",
        "const bool inside = true;",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "a matrix is read where it would lie unpermuted",
        "const int of_b = place(wn + (lane >> 4) * 8 + (lane & 7), (lane >> 3 & 1) * 4);",
        "const int of_b = (wn + (lane >> 4) * 8 + (lane & 7)) * BK + (lane >> 3 & 1) * 4;",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "pixels between those of a stride count",
        "&& t == h * stride_h",
        "",
        convolves,
        ("few rows",),
    ),
    Fault(
        "conv_gemm",
        "rows behind the last are written",
        "if (m >= rows) continue;",
        "",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_gemm",
        "of the products of 3xTF32 one is missing",
        "mma_tf32(sum[i][j], a, b_low[j]);",
        ";",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_dweight",
        "no barrier in the main loop",
        f"cp_wait<STAGES - 2>();\n        {BARRIER}",
        "cp_wait<STAGES - 2>();",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_dweight",
        "no barrier before warps add up what they share",
        f"{BARRIER}\n        if (part > 0) return;",
        "if (part > 0) return;",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_dweight",
        "no barrier before the steps' memory is used for sums",
        f"{BARRIER}  // all are done",
        "// all are done",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_dweight",
        "columns are named as rows are",
        "wn + NJ * g;",
        "wn + 4 * g;",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_dweight",
        "pixels of another tap",
        "pq - p * Q) * shape[9] + along",
        "pq - p * Q) * shape[8] + along",
        convolves,
        ("few rows",),
    ),
    Fault(
        "conv_weights",
        "no barrier before the tile is read",
        BARRIER,
        "",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_weights",
        "the tile is not turned",
        "tile[lane][i];",
        "tile[i][lane];",
        convolves,
        ("many steps",),
    ),
    Fault(
        "conv_direct",
        "no barrier between reading operands and adding them up",
        f"{BARRIER}\n        add_product(chunk, sums);",
        "add_product(chunk, sums);",
        convolves,
        ("3x3", True),
    ),
    Fault(
        "conv_direct",
        "no barrier before the tap is read",
        f"{BARRIER}\n        Tap tap = taps[lane];",
        "Tap tap = taps[lane];",
        convolves,
        ("3x3", True),
    ),
    Fault(
        "conv_direct",
        "pixels to the right of the image are read",
        "w >= 0 && w < W",
        "w >= 0",
        convolves,
        ("3x3", True),
    ),
    Fault(
        "conv_direct",
        "pixels between those of a stride count",
        "place * stride == moved && place < outputs",
        "place < outputs",
        convolves,
        ("3x3 by 2", True),
    ),
    Fault(
        "conv_direct",
        "a leaf's filters of another group",
        "K + group * filters + filter) * width",
        "K + filter) * width",
        convolves,
        ("unequal in both directions", True),
    ),
    Fault(
        "pool",
        "of equal pixels the last is taken",
        "found.of[v] > best.of[v] ||",
        "found.of[v] >= best.of[v] ||",
        check_on_gpu,
        ("max_pool2d_dx, 3x3 by 2",),
    ),
    Fault(
        "pool",
        "places are counted column by column",
        "place.of[v] == i * S + j",
        "place.of[v] == j * R + i",
        check_on_gpu,
        ("max_pool2d_dx, overlapping",),
    ),
    Fault(
        "pool",
        "pixels behind the last window",
        "place += (window - (windows - 1)) * stride;",
        "",
        check_on_gpu,
        ("max_pool2d_dx, 2x2, pixels left over",),
    ),
    Fault(
        "batchnorm",
        "no barrier in a block's sum",
        BARRIER,
        "",
        check_on_gpu,
        ("batchnorm_sums, (20, 3, 5)",),
    ),
    Fault(
        "batchnorm",
        "rows of a sum are added from another place",
        "shared[k][threadIdx.x + half * tile]",
        "shared[k][threadIdx.x + tile]",
        check_on_gpu,
        ("batchnorm_sums, (20, 3, 5)",),
    ),
    Fault(
        "batchnorm",
        "unused images have a gradient",
        "min(n, (long long)valid[0] * pixels)",
        "n",
        check_on_gpu,
        ("batchnorm_dx, (4, 6, 6)",),
    ),
    Fault(
        "batchnorm",
        "moments are merged without their means' distance",
        "fmaf(delta * delta, weight, square)",
        "square",
        check_on_gpu,
        ("moments, (1, 60, 60)",),
    ),
    Fault(
        "fold",
        "four leaves are added from left to right",
        "combined(combined(a, b), combined(c, d))",
        "combined(combined(combined(a, b), c), d)",
        fold.test_how_threads_share_a_fold_changes_nothing,
        ("float",),
    ),
    Fault(
        "fold",
        "moments of later leaves come first",
        "return {both, __dadd_rn(left.mean,",
        "return {both, __dadd_rn(right.mean,",
        fold.test_a_fold_has_the_bytes_of_the_host,
        ("moments", 21),
    ),
    Fault(
        "fold",
        "no barrier between threads that share a node",
        BARRIER,
        "",
        fold.test_how_threads_share_a_fold_changes_nothing,
        ("double",),
    ),
    Fault(
        "fold",
        "a level of the counter too far",
        "if (start >> L & 1)",
        "if (start >> L & 2)",
        fold.test_any_number_of_ranks_gives_the_same_bytes,
        ("float", 13, 2),
    ),
    Fault(
        "dense",
        "no barrier between the stages",
        BARRIER,
        "",
        check_on_gpu,
        ("dense, (400,) to 7", "dense_backward, (400,) to 7"),
    ),
    Fault(
        "dense",
        "one stage in shared memory instead of two",
        "tile_a[n & 1]",
        "tile_a[0]",
        check_on_gpu,
        ("dense, (400,) to 7", "dense_backward, (400,) to 7"),
    ),
    Fault(
        "dense",
        "quads are looked for where they would lie unturned",
        "&tile[k][turned<WIDTH>(k, place<WIDTH, OWN>(n, 4 * t))]",
        "&tile[k][place<WIDTH, OWN>(n, 4 * t)]",
        check_on_gpu,
        ("dense, (5, 3, 3) to 68", "dense_backward, (5, 3, 3) to 68"),
    ),
    Fault(
        "dense",
        "the weights' leaves are added from left to right",
        "if (plain) {",
        "if (true) {",
        dense.test_the_weights_gradient_is_folded_by_the_tree,
        (20, 16, (0, 16), False, 132),
    ),
    Fault(
        "dense",
        "rows behind the last are written",
        "if (m >= rows) continue;",
        "",
        check_on_gpu,
        ("dense, (130,) to 17", "dense_backward, (130,) to 17"),
    ),
    Fault(
        "loss",
        "no barrier before the warps are added up",
        BARRIER,
        "",
        check_on_gpu,
        ("cross_entropy, 2 classes",),
    ),
    Fault(
        "loss",
        "unused images have a gradient",
        "if (row >= (long long)*valid * pixels) {",
        "if (row > (long long)*valid * pixels) {",
        loss.test_any_number_of_images_may_be_unused,
        (21,),
    ),
    Fault(
        "loss",
        "unused images have a loss",
        "(long long)*valid * size);",
        "(long long)(*valid + 1) * size);",
        loss.test_any_number_of_images_may_be_unused,
        (5,),
    ),
    Fault(
        "loss",
        "a part of an image reaches into the next",
        "min((image + images) * size, (long long)*valid * size)",
        "(long long)*valid * size",
        check_on_gpu,
        ("cross_entropy, 2 classes, (17, 31)", "errors, 2 classes, (17, 31), power 2"),
    ),
    Fault(
        "loss",
        "of equal logits any",
        "(strange || value == best) && place < at",
        "false",
        loss.test_which_class_is_the_largest,
    ),
    Fault(
        "loss",
        "targets are where flattened images would have them",
        "k % near * far + k / near;",
        "k;",
        loss.test_values_may_lie_otherwise_than_their_targets,
        (loss.PAIRS["images that were flattened, and numbers"], False),
    ),
    Fault(
        "optimizer",
        "a product and a sum are rounded once",
        "v = momentum * kept[0] - rate * g;",
        "v = fmaf(momentum, kept[0], -(rate * g));",
        ends.test_a_step_has_the_bytes_of_numpy,
        ((0, 0, 0),),
    ),
    Fault(
        "optimizer",
        "what is left over of four is left out",
        "int i = rest + threadIdx.x; i < count;",
        "int i = rest + threadIdx.x; i < rest;",
        ends.test_a_step_has_the_bytes_of_numpy,
        ((0, 0, 0),),
    ),
    Fault(
        "images",
        "mirrored by one pixel too few",
        "if (turned & LEFT_TO_RIGHT) w = W - 1 - w;",
        "if (turned & LEFT_TO_RIGHT && w) w = W - w;",
        check_on_gpu,
        ("images, (3, 5, 7), mirrored",),
    ),
    Fault(
        "images",
        "unused images are there",
        "if (image >= (valid ? *valid : count))",
        "if (image >= count)",
        ends.test_unused_images_are_zero_whatever_their_numbers_say,
    ),
    Fault(
        "images",
        "unused targets are there",
        "const bool there = image < (valid ? *valid : count);",
        "const bool there = image < count;",
        ends.test_unused_images_are_zero_whatever_their_numbers_say,
    ),
    Fault(
        "images",
        "the channels of a target stay apart",
        "table[e % channels * places + e / channels]",
        "table[e]",
        ends.test_targets_of_a_data_set,
        ((3, 5, 7), 37, 3),
    ),
    Fault(
        "elementwise",
        "rows of the target lie as those of the source",
        "to + row * piece[5]",
        "to + row * piece[4]",
        elementwise.test_pack,
        ("f4", 3),
    ),
    Fault(
        "activations",
        "exponents that no float has",
        "x = x < -87.3f ? -87.3f : x;",
        "",
        layers.test_activations_of_all_sizes,
    ),
    Fault(
        "lrn",
        "sums before all products are there",
        BARRIER,
        "",
        check_on_gpu,
        ("cross_channel_norm_dx, strong, (1100,)", "cross_channel_norm, strong, (1100,)"),
    ),
    Fault(
        "dropout",
        "the next call's words are left out",
        "if (skip + count > GROUP)",
        "if (skip + count > GROUP + 8)",
        check_on_gpu,
        ("dropout, (3, 9, 1), 0.5",),
    ),
    Fault(
        "concat",
        "all parts begin at the first channel",
        "row * pitch + first + (i",
        "row * pitch + (i",
        check_on_gpu,
        ("concat, (8, 4, 4)",),
    ),
    Fault(
        "optimizer",
        "the velocity before the step leads",
        "const float change = rate * g, v = momentum * kept[0] - change;\n        kept[0] = v;\n"
        "        w = w + (momentum * v - change);",
        "const float change = rate * g, v = momentum * kept[0] - change;\n"
        "        w = w + (momentum * kept[0] - change);\n        kept[0] = v;",
        check_on_gpu,
        ("optimizer_step, nesterov",),
    ),
    Fault(
        "optimizer",
        "a decoupled decay joins the gradient",
        "kept[0] = mean_decay * kept[0] + mean_share * g;",
        "if (decay != 0.0f) g = g + decay * w;\n"
        "        kept[0] = mean_decay * kept[0] + mean_share * g;",
        check_on_gpu,
        ("optimizer_step, adamw",),
    ),
    Fault(
        "optimizer",
        "the decay is left out of the direction",
        "if (decay != 0.0f) direction = direction + decay * w;",
        "",
        check_on_gpu,
        ("optimizer_step, adamw",),
    ),
    Fault(
        "optimizer",
        "the gradient is not squared",
        "kept[1] = square_decay * kept[1] + square_share * (g * g)",
        "kept[1] = square_decay * kept[1] + square_share * g",
        check_on_gpu,
        ("optimizer_step, adam",),
    ),
    Fault(
        "clip",
        "a tree of sums without barriers",
        BARRIER,
        "",
        solvers.test_clipping_is_numpys,
        ("l2norm", 1 << 22),
    ),
    Fault(
        "program",
        "no barrier before a step's row is known",
        BARRIER,
        "",
        program.test_a_replay_sees_the_numbers_of_its_step,
        (True,),
    ),
]


def holds(check, arguments, order):
    """Whether a test passes on the emulated GPU in this schedule."""
    with opened(order) as device, pytest.MonkeyPatch.context() as monkeypatch:
        names = check.__code__.co_varnames[: check.__code__.co_argcount]
        given = [monkeypatch] if "monkeypatch" in names else []
        try:
            check(device, *given, *arguments)
        except (AssertionError, RuntimeError):
            return False
    return True


@functools.cache
def holds_without_faults(check, arguments):
    return all(holds(check, arguments, order) for order in ORDERS)


def cases():
    """The first fault of a family is looked for in every run, the others in the slow part."""
    families = set()
    for fault in FAULTS:
        marks = [pytest.mark.slow("faults")] if fault.family in families else []
        families.add(fault.family)
        yield pytest.param(fault, id=f"{fault.family}: {fault.what}", marks=marks)


@pytest.mark.parametrize("fault", list(cases()))
def test_a_fault_is_found(device, monkeypatch, fault):
    assert holds_without_faults(fault.check, fault.arguments)
    source = kernels.source

    def planted(name):
        text = source(name)
        if name != f"{fault.family}.cu":
            return text
        assert fault.old in text, "the kernel has changed: plant the fault anew"
        return text.replace(fault.old, fault.new)

    monkeypatch.setattr(kernels, "source", planted)
    assert not all(holds(fault.check, fault.arguments, order) for order in ORDERS)


def test_every_family_has_a_fault():
    assert {fault.family for fault in FAULTS} == set(kernels.families())
