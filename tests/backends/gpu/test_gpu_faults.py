"""Check that the tests of GPU kernels fail if a fault is planted in a kernel.

Each fault is an edit of a kernel's source. The check that is listed with the fault must fail with
the fault in at least one schedule of the emulated GPU, and pass without the fault.
"""

import functools

import pytest
import test_gpu_activation as activation
import test_gpu_batchnorm as batchnorm
import test_gpu_bf16 as bf16
import test_gpu_dense as dense
import test_gpu_elementwise as elementwise
import test_gpu_fold as fold
import test_gpu_images as images
import test_gpu_loss as loss
import test_gpu_optimizer as optimizer
import test_program as program
from emulator import opened
from planted_faults import BARRIER, CONVOLUTION_FAULTS, Fault, faults
from test_conformance import check_on_gpu

from mpidl.backends import settings
from mpidl.backends.gpu import kernels

ORDERS = (0, 1, 2)


def check_bf16(device, monkeypatch, check, *arguments):
    """Run a check of test_gpu_bf16.py, whose fixture sets the precision."""
    monkeypatch.setattr(settings, "precision", "bf16")
    check(device, *arguments)


FAULTS = [
    *CONVOLUTION_FAULTS,
    Fault(
        family="conv_gemm",
        description="a bfloat16 sum is rounded before the bias is added",
        old="tile[i * PITCH + column + e] + of_bias",
        new="as_stored(tile[i * PITCH + column + e]) + of_bias",
        check=check_bf16,
        arguments=(bf16.test_an_op_rounds_its_result_once, bf16.convolution),
    ),
    Fault(
        family="conv_gemm",
        description="the statistics are those of numbers before they are stored in bfloat16",
        old="= as_stored(v.at[e]);",
        new="= v.at[e];",
        check=check_bf16,
        arguments=(bf16.test_statistics_are_those_of_the_stored_numbers,),
    ),
    Fault(
        family="batchnorm",
        description="a normalized number is rounded to bfloat16 before it is added",
        old="sum = activated(v[i].at[k], a, of_a, k) +",
        new="sum = as_stored(activated(v[i].at[k], a, of_a, k)) +",
        check=check_bf16,
        arguments=(bf16.test_an_op_rounds_its_result_once, bf16.addition),
    ),
    Fault(
        family="pool",
        description="the last of equal pixels is the maximum",
        old="number > result.at[v] ||",
        new="number >= result.at[v] ||",
        check=check_on_gpu,
        arguments=("max_pool2d_dx, 3x3 by 2",),
    ),
    Fault(
        family="pool",
        description="places are counted by columns",
        old="place.at[v] == i * S + j",
        new="place.at[v] == j * R + i",
        check=check_on_gpu,
        arguments=("max_pool2d_dx, overlapping",),
    ),
    Fault(
        family="pool",
        description="pixels after the last window have a gradient",
        old="place += (window - (windows - 1)) * stride;",
        new="",
        check=check_on_gpu,
        arguments=("max_pool2d_dx, 2x2, pixels left over",),
    ),
    Fault(
        family="pool",
        description="padding counts in each mean",
        old="if (count_padding) return",
        new="return",
        check=check_on_gpu,
        arguments=("average_pool2d_dx, 3x3 by 2, padding, pixels of the image",),
    ),
    Fault(
        family="pool",
        description="the sums of dx leave out the last rows of a leaf",
        old="for (int i = 0; i < FEW && row",
        new="for (int i = 0; i < FEW - 1 && row",
        check=check_on_gpu,
        arguments=("max_pool2d_dx, a row of many threads, deferred",),
    ),
    Fault(
        family="pool",
        description="pixels are not clipped while they are read",
        old="{x, mean, scale, beta, low, high};\n    const Span",
        new="{x, mean, scale, beta, low, 1e9f};\n    const Span",
        check=check_on_gpu,
        arguments=("max_pool2d_dx, 3x3 by 2, padding, deferred",),
    ),
    Fault(
        family="pad",
        description="rows begin where columns do",
        old="(int)(row % P) - top",
        new="(int)(row % P) - left",
        check=check_on_gpu,
        arguments=("pad2d, a border",),
    ),
    *faults(
        "resample",
        check_on_gpu,
        "resample, many taps, deferred",
        "take_channels, a part, back, (4, 3)",
        edits={
            "the last column of a sum is left out": ("j < last; ++j", "j < last - 1; ++j"),
            "rows have the weights of columns": ("weight_of(row)", "weight_of(column)"),
            "pixels are not clipped while they are read": (
                "beta, low, high};",
                "beta, low, 1e9f};",
            ),
            "channels without a source keep what memory holds": (
                "y[i] = index < 0 ? put(0.0f) : x",
                "if (index >= 0) y[i] = x",
            ),
        },
    ),
    *faults(
        "batchnorm",
        check_on_gpu,
        "batchnorm_sums, (20, 3, 5)",
        edits={
            "no barrier in a block's sum": (BARRIER, ""),
            "rows of a sum are read from another place": (
                "shared[k][threadIdx.x + half * tile]",
                "shared[k][threadIdx.x + tile]",
            ),
        },
    ),
    Fault(
        family="batchnorm",
        description="unused images have a gradient",
        old="min(n, (long long)valid[0] * pixels)",
        new="n",
        check=check_on_gpu,
        arguments=("batchnorm_dx, (4, 6, 6)",),
    ),
    *faults(
        "batchnorm",
        batchnorm.test_the_gradient_of_a_sum_reads_bits_with_the_bytes_of_the_sum_itself,
        (20, 3, 5),
        2,
        edits={
            "the bits of a sum have another order": (
                "bits >> k & 1",
                "bits >> (VEC - 1 - k) & 1",
            ),
            "only one cotangent of a sum is read": ("g[i].at[k] + more.at[k]", "g[i].at[k]"),
        },
    ),
    Fault(
        family="batchnorm",
        description="the upper limit of an activation passes gradients",
        old="const Source source = {x, mean, scale, beta, low, high};",
        new="const Source source = {x, mean, scale, beta, low, 1e9f};",
        check=check_on_gpu,
        arguments=("activation_sums, (20, 3, 5), clip",),
    ),
    Fault(
        family="batchnorm",
        description="moments are merged without the distance of their means",
        old="fmaf(delta * delta, weight, square)",
        new="square",
        check=check_on_gpu,
        arguments=("moments, (1, 60, 60)",),
    ),
    Fault(
        family="fold",
        description="four leaves are added from left to right",
        old="combined(combined(a, b), combined(c, d))",
        new="combined(combined(combined(a, b), c), d)",
        check=fold.test_the_spread_over_threads_does_not_change_a_byte,
        arguments=("float",),
    ),
    Fault(
        family="fold",
        description="moments of later leaves come first",
        old="return {both, __dadd_rn(left.mean,",
        new="return {both, __dadd_rn(right.mean,",
        check=fold.test_a_fold_has_the_bytes_of_the_host,
        arguments=("moments", 21),
    ),
    *faults(
        "fold",
        fold.test_the_spread_over_threads_does_not_change_a_byte,
        "double",
        edits={
            "no barrier between threads that share a node": (
                f"    {BARRIER}\n    if (line",
                "    if (line",
            ),
            "no barrier before the next columns": (f"{BARRIER}  // before the next columns", ""),
        },
    ),
    *faults(
        "fold",
        fold.test_many_leaves_take_one_launch,
        edits={
            "no barrier before the next pass": (f"{BARRIER}  // before the next pass", ""),
            "the node of the last pass is not combined": ("else if (!last)", "else"),
        },
    ),
    Fault(
        family="fold",
        description="the results of a step are not folded",
        old="(leaves, row[1], 0, 1, 1,",
        new="(leaves, 1, 0, 1, 1,",
        check=fold.test_the_results_of_a_step_are_folded_at_its_end,
    ),
    Fault(
        family="fold",
        description="unequal counts have equal weights",
        old="if (n != m || n > 1 << 26)",
        new="if (n > 1 << 26)",
        check=fold.test_a_fold_has_the_bytes_of_the_host,
        arguments=("moments", 21),
    ),
    *faults(
        "fold",
        fold.test_statistics_and_factors_fold_waiting_sums,
        13,
        edits={
            "statistics of other channels": (
                "shift[c] = (float)all.mean",
                "shift[c] = (float)mean[0]",
            ),
            "the sums of products are not stored": ("root[width + column] = v.product;", ""),
        },
    ),
    Fault(
        family="batchnorm",
        description="all layers have the decay of the first",
        old="__longlong_as_double(row[4])",
        new="__longlong_as_double(table[4])",
        check=batchnorm.test_all_running_statistics_are_updated_in_one_launch,
    ),
    Fault(
        family="fold",
        description="the counter is off by one level",
        old="if (start >> L & 1)",
        new="if (start >> L & 2)",
        check=fold.test_any_number_of_ranks_gives_the_same_bytes,
        arguments=("float", 13, 2),
    ),
    Fault(
        family="conv_dweight",
        description="leaves are added from left to right",
        old="plain ? leaf > 0 : leaf >> l & 1;",
        new="leaf > 0;",
        check=dense.test_dweight_is_folded_by_the_tree,
        arguments=(20, 16, (0, 16), False, 1),
    ),
    Fault(
        family="loss",
        description="no barrier before the warps are added up",
        old=f"{BARRIER}\n        if (threadIdx.x == 0)",
        new="if (threadIdx.x == 0)",
        check=check_on_gpu,
        arguments=("cross_entropy, 2 classes",),
    ),
    Fault(
        family="loss",
        description="unused images have a gradient",
        old="labels[row] : -1;",
        new="labels[row] : 0;",
        check=check_on_gpu,
        arguments=("cross_entropy_dlogits, 10 classes",),
    ),
    Fault(
        family="loss",
        description="unused images with target probabilities have a gradient",
        old="if (row >= (long long)*valid * pixels) {",
        new="if (row > (long long)*valid * pixels) {",
        check=check_on_gpu,
        arguments=("soft_cross_entropy_dlogits, 10 classes",),
    ),
    Fault(
        family="loss",
        description="the sum of the target probabilities is assumed to be 1",
        old="(p * all_targets - q)",
        new="(p - q)",
        check=check_on_gpu,
        arguments=("soft_cross_entropy_dlogits, 10 classes",),
    ),
    Fault(
        family="loss",
        description="unused images have a loss",
        old="(long long)*of.valid)",
        new="(long long)*of.valid + 1)",
        check=check_on_gpu,
        arguments=("errors, 10 classes, power 2",),
    ),
    Fault(
        family="loss",
        description="a part of an image reaches into the next",
        old="min(image + of.images, (long long)*of.valid)",
        new="(long long)*of.valid",
        check=check_on_gpu,
        arguments=("cross_entropy, 2 classes, (3, 87)", "errors, 2 classes, (3, 87), power 2"),
    ),
    Fault(
        family="loss",
        description="no barrier before the next leaf",
        old=f"{BARRIER}  // before the next leaf",
        new="",
        check=loss.test_a_loss_and_its_count_are_one_launch,
        arguments=("labels",),
    ),
    Fault(
        family="loss",
        description="all sums of a kernel are of one kind",
        old="kind = row[9]",
        new="kind = 0",
        check=check_on_gpu,
        arguments=("correct_count, 10 classes",),
    ),
    Fault(
        family="loss",
        description="any of equal logits is the largest",
        old="(strange || value == best) && place < at",
        new="false",
        check=loss.test_the_first_of_equal_scores_is_the_predicted_class,
    ),
    Fault(
        family="loss",
        description="targets are read in the order of flattened images",
        old="k % near * far + k / near;",
        new="k;",
        check=loss.test_values_and_targets_can_have_different_layouts,
        arguments=(loss.PAIRS["flattened images and numbers"], False),
    ),
    *faults(
        "optimizer",
        optimizer.test_sgdm_step_matches_numpy_aligned_or_not,
        (0, 0, 0),
        edits={
            "a product and a sum are rounded once": (
                "kept[0] = momentum * kept[0] - rate * regularized(w, g, decay);",
                "kept[0] = fmaf(momentum, kept[0], -(rate * regularized(w, g, decay)));",
            ),
            "the remainder of groups of four is skipped": (
                "int i = rest + threadIdx.x; i < count;",
                "int i = rest + threadIdx.x; i < rest;",
            ),
        },
    ),
    Fault(
        family="images",
        description="mirrored images are shifted by one pixel",
        old="if (turned & LEFT_TO_RIGHT) w = W - 1 - w;",
        new="if (turned & LEFT_TO_RIGHT && w) w = W - w;",
        check=check_on_gpu,
        arguments=("images, (3, 5, 7), mirrored",),
    ),
    *faults(
        "images",
        images.test_unused_images_are_zero_whatever_their_indices,
        edits={
            "unused images are gathered": ("of.said(2, 0, of.row[17])", "of.row[17]"),
            "unused images are not zero": ("is_used ? result : (Out)0", "result"),
        },
    ),
    Fault(
        family="images",
        description="a block of threads gathers only one part",
        old="part += gridDim.x",
        new="part += 1 << 30",
        check=images.test_images_and_targets_are_gathered_in_one_launch,
    ),
    Fault(
        family="images",
        description="channels of a target are not interleaved",
        old="own[((long long)c * H + h) * W + w]",
        new="own[e]",
        check=images.test_targets_of_a_dataset,
        arguments=((3, 5, 7), 37, 3),
    ),
    Fault(
        family="elementwise",
        description="rows of the target have the stride of the source",
        old="to + row * piece[5]",
        new="to + row * piece[4]",
        check=elementwise.test_pack_joins_columns_in_one_launch,
        arguments=("f4", 3),
    ),
    Fault(
        family="activations",
        description="exponents are not limited to those of floats",
        old="x = larger(splat(-87.3f), x);",
        new="",
        check=activation.test_rounding_is_at_most_two_and_a_half_ulps,
        arguments=("sigmoid",),
    ),
    Fault(
        family="prelu",
        description="four channels have one slope",
        old="channel = channel + 1 == slopes ? 0 : channel + 1;",
        new="",
        check=check_on_gpu,
        arguments=("prelu, (5, 3, 7), 5",),
    ),
    Fault(
        family="gates",
        description="a sum leaves out the rows of other images' axes",
        old="const int a = (int)(row / many1);",
        new="const int a = 0;",
        check=check_on_gpu,
        arguments=("multiply_dx, one column, b",),
    ),
    Fault(
        family="gates",
        description="a gate of channels is read like one of pixels",
        old="if (step) return load<WIDTH>(x);",
        new="return load<WIDTH>(x);",
        check=check_on_gpu,
        arguments=("multiply, a number",),
    ),
    Fault(
        family="lrn",
        description="no barrier before products are added",
        old=BARRIER,
        new="",
        check=check_on_gpu,
        arguments=("cross_channel_norm_dx, strong, (1100,)", "cross_channel_norm, strong, (1100,)"),
    ),
    Fault(
        family="group_norm",
        description="all groups of an image have the statistics of the first group",
        old="return row / height * per_row + channel / width;",
        new="return row / height * per_row;",
        check=check_on_gpu,
        arguments=("group_norm, groups",),
    ),
    Fault(
        family="group_norm",
        description="the gradient of a pixel ignores the variance",
        old="rstd * fmaf(-product, (v.at[k] - mean) * rstd, dz - sum)",
        new="rstd * (dz - sum)",
        check=check_on_gpu,
        arguments=("group_norm_backward, pixels",),
    ),
    *faults(
        "recurrent",
        check_on_gpu,
        "recurrence, lstm of several tiles",
        "recurrence_backward, gru in reverse, truncated",
        "recurrence_backward, lstm",
        "recurrence, gru",
        edits={
            "no barrier before the next operands are copied": (
                "sums[i][g] += part[i][g];\n        __syncthreads();",
                "sums[i][g] += part[i][g];",
            ),
            "the state before the first step is forgotten": (
                "hidden ? as_stored(hidden[image * units + unit]) : 0.f",
                "0.f",
            ),
            "the cell of the step before is forgotten": (
                "float c = step ? cells[place(image, steps, before, units, unit)]",
                "float c = step ? 0.f",
            ),
            "the gradient of a cell ends after a step": (
                "next >= 0 ? dcell[of_state] : 0.f",
                "0.f",
            ),
            "the gradient of a candidate ignores the reset gate": (
                "grad[3] = grad[2] * gate[0];",
                "grad[3] = grad[2];",
            ),
            "gates of the last units are those of the next gate": (
                "(column / UNITS) * units + unit;",
                "(column / UNITS) * UNITS + unit;",
            ),
        },
    ),
    Fault(
        family="dropout",
        description="words of the next call are skipped",
        old="if (skip + count > GROUP)",
        new="if (skip + count > GROUP + 8)",
        check=check_on_gpu,
        arguments=("dropout, (3, 9, 1), 0.5",),
    ),
    Fault(
        family="elementwise",
        description="rows of a part have the distance of rows of the whole",
        old="from[row * piece[5]",
        new="from[row * piece[6]",
        check=check_on_gpu,
        arguments=("concat, (8, 4, 4)",),
    ),
    Fault(
        family="overlap",
        description="probabilities are not squared",
        old="is_squared ? chance * chance : chance;",
        new="chance;",
        check=check_on_gpu,
        arguments=("overlap, 3 classes, (2, 3), plain",),
    ),
    Fault(
        family="optimizer",
        description="Nesterov's step uses the old velocity",
        old="kept[0] = momentum * kept[0] - change;\n    return w + (momentum * kept[0] - change);",
        new=(
            "w = w + (momentum * kept[0] - change);\n    kept[0] = momentum * kept[0] - change;\n"
            "    return w;"
        ),
        check=check_on_gpu,
        arguments=("optimizer_step, nesterov",),
    ),
    *faults(
        "optimizer",
        check_on_gpu,
        "optimizer_step, adamw",
        edits={
            "a decoupled decay is added to the gradient": (
                "correction * adam_direction(g, numbers, kept)",
                "correction * adam_direction(regularized(w, g, decay), numbers, kept)",
            ),
            "the decay is missing from the direction": (
                "regularized(w, correction * adam_direction(g, numbers, kept), decay)",
                "correction * adam_direction(g, numbers, kept)",
            ),
        },
    ),
    Fault(
        family="optimizer",
        description="the gradient is not squared",
        old="kept[1] = square_decay * kept[1] + square_share * (g * g)",
        new="kept[1] = square_decay * kept[1] + square_share * g",
        check=check_on_gpu,
        arguments=("optimizer_step, adam",),
    ),
    Fault(
        family="clip",
        description="a tree of sums without barriers",
        old=BARRIER,
        new="",
        check=check_on_gpu,
        arguments=("clip, l2norm, 0.25",),
    ),
    *faults(
        "clip",
        check_on_gpu,
        "trust, lars",
        edits={
            "the ratio omits the decay": ("if (separate) divisor += ", "if (0) divisor += "),
            "the ratio of one block": (
                "for (int i = firsts[p] + threadIdx.x; i < firsts[p + 1]; i += 256) {\n"
                "            weight",
                "for (int i = firsts[p] + threadIdx.x; i < firsts[p] + 1; i += 256) {\n"
                "            weight",
            ),
        },
    ),
    Fault(
        family="program",
        description="no barrier before the row of a step is read",
        old=BARRIER,
        new="",
        check=program.test_a_replay_reads_the_numbers_of_its_step,
        arguments=(True,),
    ),
]


def passes(check, arguments, order):
    """Return whether a check passes on the emulated GPU with the given schedule."""
    with opened(order) as device, pytest.MonkeyPatch.context() as monkeypatch:
        names = check.__code__.co_varnames[: check.__code__.co_argcount]
        fixtures = [monkeypatch] if "monkeypatch" in names else []
        try:
            check(device, *fixtures, *arguments)
        except (AssertionError, RuntimeError):
            return False
    return True


@functools.cache
def passes_without_faults(check, arguments):
    return all(passes(check, arguments, order) for order in ORDERS)


def cases():
    """Yield all faults. All except the first fault of each family are slow."""
    families = set()
    for fault in FAULTS:
        marks = [pytest.mark.slow("faults")] if fault.family in families else []
        families.add(fault.family)
        yield pytest.param(fault, id=f"{fault.family}: {fault.description}", marks=marks)


@pytest.mark.parametrize("fault", list(cases()))
def test_a_planted_fault_is_detected(device, monkeypatch, fault):
    assert passes_without_faults(fault.check, fault.arguments)
    source = kernels.source

    def source_with_fault(name):
        text = source(name)
        if name != f"{fault.family}.cu":
            return text
        assert fault.old in text, "the kernel has changed: adapt the fault to it"
        return text.replace(fault.old, fault.new)

    monkeypatch.setattr(kernels, "source", source_with_fault)
    assert not all(passes(fault.check, fault.arguments, order) for order in ORDERS)


def test_every_kernel_family_has_a_fault():
    assert {fault.family for fault in FAULTS} == set(kernels.families())
