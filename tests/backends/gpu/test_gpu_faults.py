"""Check that the tests of GPU kernels fail if a fault is planted in a kernel.

Each fault is an edit of a kernel's source. The check that is listed with the fault must fail with
the fault in at least one schedule of the emulated GPU, and pass without the fault.
"""

import functools

import pytest
import test_gpu_activation as activation
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

from mpidl.backends.gpu import kernels

ORDERS = (0, 1, 2)
FAULTS = [
    *CONVOLUTION_FAULTS,
    Fault(
        *("pool", "the last of equal pixels is the maximum"),
        *("value > result.of[v] ||", "value >= result.of[v] ||"),
        *(check_on_gpu, ("max_pool2d_dx, 3x3 by 2",)),
    ),
    Fault(
        *("pool", "places are counted by columns"),
        *("place.of[v] == i * S + j", "place.of[v] == j * R + i"),
        *(check_on_gpu, ("max_pool2d_dx, overlapping",)),
    ),
    Fault(
        *("pool", "pixels after the last window have a gradient"),
        *("place += (window - (windows - 1)) * stride;", ""),
        *(check_on_gpu, ("max_pool2d_dx, 2x2, pixels left over",)),
    ),
    Fault(
        *("pool", "padding counts in each mean"),
        *("if (count_padding) return", "return"),
        *(check_on_gpu, ("average_pool2d_dx, 3x3 by 2, padding, pixels of the image",)),
    ),
    Fault(
        *("pad", "rows begin where columns do"),
        *("(int)(row % P) - top", "(int)(row % P) - left"),
        *(check_on_gpu, ("pad2d, a border",)),
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
        *("batchnorm", "unused images have a gradient"),
        *("min(n, (long long)valid[0] * pixels)", "n"),
        *(check_on_gpu, ("batchnorm_dx, (4, 6, 6)",)),
    ),
    Fault(
        *("batchnorm", "moments are merged without the distance of their means"),
        *("fmaf(delta * delta, weight, square)", "square"),
        *(check_on_gpu, ("moments, (1, 60, 60)",)),
    ),
    Fault(
        *("fold", "four leaves are added from left to right"),
        *("combined(combined(a, b), combined(c, d))", "combined(combined(combined(a, b), c), d)"),
        *(fold.test_the_spread_over_threads_does_not_change_a_byte, ("float",)),
    ),
    Fault(
        *("fold", "moments of later leaves come first"),
        *("return {both, __dadd_rn(left.mean,", "return {both, __dadd_rn(right.mean,"),
        *(fold.test_a_fold_has_the_bytes_of_the_host, ("moments", 21)),
    ),
    Fault(
        *("fold", "no barrier between threads that share a node"),
        *(BARRIER, ""),
        *(fold.test_the_spread_over_threads_does_not_change_a_byte, ("double",)),
    ),
    Fault(
        *("fold", "the counter is off by one level"),
        *("if (start >> L & 1)", "if (start >> L & 2)"),
        *(fold.test_any_number_of_ranks_gives_the_same_bytes, ("float", 13, 2)),
    ),
    *faults(
        "dense",
        check_on_gpu,
        "dense, (400,) to 7",
        "dense_backward, (400,) to 7",
        edits={
            "no barrier between the stages": (BARRIER, ""),
            "one stage in shared memory instead of two": ("tile_a[n & 1]", "tile_a[0]"),
        },
    ),
    Fault(
        *("dense", "quads are read without their rotation"),
        *(
            "&tile[k][turned<WIDTH>(k, place<WIDTH, OWN>(n, 4 * t))]",
            "&tile[k][place<WIDTH, OWN>(n, 4 * t)]",
        ),
        *(check_on_gpu, ("dense, (5, 3, 3) to 68", "dense_backward, (5, 3, 3) to 68")),
    ),
    Fault(
        *("dense", "leaves of dweight are added from left to right"),
        *("if (plain) {", "if (true) {"),
        *(dense.test_dweight_is_folded_by_the_tree, (20, 16, (0, 16), False, 132)),
    ),
    Fault(
        *("dense", "rows after the last are written"),
        *("if (m >= rows) continue;", ""),
        *(check_on_gpu, ("dense, (130,) to 17", "dense_backward, (130,) to 17")),
    ),
    Fault(
        *("loss", "no barrier before the warps are added up"),
        *(BARRIER, ""),
        *(check_on_gpu, ("cross_entropy, 2 classes",)),
    ),
    Fault(
        *("loss", "unused images have a gradient"),
        *("labels[row] : -1;", "labels[row] : 0;"),
        *(check_on_gpu, ("cross_entropy_dlogits, 10 classes",)),
    ),
    Fault(
        *("loss", "unused images with target probabilities have a gradient"),
        *("if (row >= (long long)*valid * pixels) {", "if (row > (long long)*valid * pixels) {"),
        *(check_on_gpu, ("soft_cross_entropy_dlogits, 10 classes",)),
    ),
    Fault(
        *("loss", "the sum of the target probabilities is assumed to be 1"),
        *("(p * all_targets - q)", "(p - q)"),
        *(check_on_gpu, ("soft_cross_entropy_dlogits, 10 classes",)),
    ),
    Fault(
        *("loss", "unused images have a loss"),
        *("(long long)*valid * size);", "(long long)(*valid + 1) * size);"),
        *(check_on_gpu, ("errors, 10 classes, power 2",)),
    ),
    Fault(
        *("loss", "a part of an image reaches into the next"),
        *("min((image + images) * size, (long long)*valid * size)", "(long long)*valid * size"),
        *(
            check_on_gpu,
            ("cross_entropy, 2 classes, (3, 87)", "errors, 2 classes, (3, 87), power 2"),
        ),
    ),
    Fault(
        *("loss", "any of equal logits is the largest"),
        *("(strange || value == best) && place < at", "false"),
        loss.test_the_first_of_equal_scores_is_the_predicted_class,
    ),
    Fault(
        *("loss", "targets are read in the order of flattened images"),
        *("k % near * far + k / near;", "k;"),
        *(
            loss.test_values_and_targets_can_have_different_layouts,
            (loss.PAIRS["flattened images and numbers"], False),
        ),
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
        *("images", "mirrored images are shifted by one pixel"),
        *(
            "if (turned & LEFT_TO_RIGHT) w = W - 1 - w;",
            "if (turned & LEFT_TO_RIGHT && w) w = W - w;",
        ),
        *(check_on_gpu, ("images, (3, 5, 7), mirrored",)),
    ),
    *faults(
        "images",
        images.test_unused_images_are_zero_whatever_their_indices,
        edits={
            "unused images are not zero": (
                "if (image >= (valid ? *valid : count))",
                "if (image >= count)",
            ),
            "unused targets are not zero": (
                "const bool there = image < (valid ? *valid : count);",
                "const bool there = image < count;",
            ),
        },
    ),
    Fault(
        *("images", "channels of a target are not interleaved"),
        *("table[e % channels * places + e / channels]", "table[e]"),
        *(images.test_targets_of_a_dataset, ((3, 5, 7), 37, 3)),
    ),
    Fault(
        *("elementwise", "rows of the target have the stride of the source"),
        *("to + row * piece[5]", "to + row * piece[4]"),
        *(elementwise.test_pack_joins_columns_in_one_launch, ("f4", 3)),
    ),
    Fault(
        *("activations", "exponents are not limited to those of floats"),
        *("x = larger(splat(-87.3f), x);", ""),
        *(activation.test_rounding_is_at_most_two_and_a_half_ulps, ("sigmoid",)),
    ),
    Fault(
        *("prelu", "four channels have one slope"),
        *("channel = channel + 1 == slopes ? 0 : channel + 1;", ""),
        *(check_on_gpu, ("prelu, (5, 3, 7), 5",)),
    ),
    Fault(
        *("lrn", "no barrier before products are added"),
        *(BARRIER, ""),
        *(
            check_on_gpu,
            ("cross_channel_norm_dx, strong, (1100,)", "cross_channel_norm, strong, (1100,)"),
        ),
    ),
    Fault(
        *("dropout", "words of the next call are skipped"),
        *("if (skip + count > GROUP)", "if (skip + count > GROUP + 8)"),
        *(check_on_gpu, ("dropout, (3, 9, 1), 0.5",)),
    ),
    Fault(
        *("concat", "all parts start at the first channel"),
        *("row * pitch + first + (i", "row * pitch + (i"),
        *(check_on_gpu, ("concat, (8, 4, 4)",)),
    ),
    Fault(
        *("overlap", "probabilities are not squared"),
        *("is_squared ? chance * chance : chance;", "chance;"),
        *(check_on_gpu, ("overlap, 3 classes, (2, 3), plain",)),
    ),
    Fault(
        *("optimizer", "Nesterov's step uses the old velocity"),
        *(
            "kept[0] = momentum * kept[0] - change;\n    return w + (momentum * kept[0] - change);",
            "w = w + (momentum * kept[0] - change);\n    kept[0] = momentum * kept[0] - change;\n"
            "    return w;",
        ),
        *(check_on_gpu, ("optimizer_step, nesterov",)),
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
        *("optimizer", "the gradient is not squared"),
        *(
            "kept[1] = square_decay * kept[1] + square_share * (g * g)",
            "kept[1] = square_decay * kept[1] + square_share * g",
        ),
        *(check_on_gpu, ("optimizer_step, adam",)),
    ),
    Fault(
        *("clip", "a tree of sums without barriers"),
        *(BARRIER, ""),
        *(check_on_gpu, ("clip, l2norm, 0.25",)),
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
        *("program", "no barrier before the row of a step is read"),
        *(BARRIER, ""),
        *(program.test_a_replay_reads_the_numbers_of_its_step, (True,)),
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
