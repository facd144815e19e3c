"""Compare ops with plain float64 references; every family of ops uses these tests."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape
from mpidl.core.blocks import LANES, zero_unused

IDLE_RANK = SimpleNamespace(rank=1, size=2)  # has no images if there is only one block


class Case(NamedTuple):
    """An op, its reference on whole arrays, and the shapes of its arguments.

    `images` has, for each blocked argument, the shape of one image's entry. A shape that starts
    with "labels" stands for integers from 0 to 5. `replicated` has the shapes of the learnables.
    """

    op: object
    reference: object
    images: list
    replicated: list = ()

    def arrays(self, count, dtype=np.float64):
        """Return the arguments of `count` images as whole arrays, and the replicated arguments."""
        images = [
            np.arange(count * math.prod(shape[1:])).reshape(count, *shape[1:]) * 7 % 6
            if shape[:1] == ("labels",)
            else numbers(f"image values {i}", count, *shape, dtype=dtype)
            for i, shape in enumerate(self.images)
        ]
        return images, [
            numbers(f"learnable {i}", *shape, dtype=dtype)
            for i, shape in enumerate(self.replicated)
        ]

    def arguments(self, world, count, dtype=np.float64):
        """Return the arguments of the op, with this rank's share of the images."""
        return share_of(world, *self.arrays(count, dtype))


def share_of(world, images, replicated):
    values = blocked(world, *images)
    return [*(values if isinstance(values, tuple) else (values,)), *replicated]


def plain(world, value):
    """Return a result as a plain array, which is the same on every rank."""
    value = tape.value_of(value)
    return world.gplus(value) if isinstance(value, dl.Partial) else all_images(world, value)


def gradients(world, op, args):
    """Return the result, and all arguments' cotangents given a fixed cotangent of the result."""
    variables = [dl.Var(a, name="x") if a.dtype.kind == "f" else a for a in args]
    y = op(*variables)
    dy = numbers("dy", *y.shape, dtype=y.dtype)
    if isinstance(y.value, dl.Blocked):
        dy = blocked(world, dy, batch=y.value.batch)
    result = plain(world, y)
    cotangents = tape.backward(y, dy, fold=world.gplus)
    arrays = []
    for variable in variables:
        if isinstance(variable, dl.Var):
            cotangent = cotangents[variable]
            if isinstance(cotangent, dl.Blocked):
                assert_zero_unused(cotangent)
            is_array = isinstance(cotangent, np.ndarray)
            arrays.append(cotangent if is_array else plain(world, cotangent))
    return result, arrays


def assert_zero_unused(cotangent):
    """Check that the unused lanes of every cotangent are zero."""
    assert np.array_equal(zero_unused(cotangent.lanes.copy(), cotangent.batch), cotangent.lanes)


def bytes_of_gradients(world, op, args):
    result, cotangents = gradients(world, op, args)
    return [array.tobytes() for array in (result, *cotangents)]


def with_dirty_lanes(value, number):
    """Return a value with large numbers in the unused lanes, if this rank has unused lanes."""
    if not isinstance(value, dl.Blocked) or value.dtype.kind != "f":
        return value
    lanes, count = value.lanes.copy(), value.batch.count
    if value.batch.blocks and value.batch.images[1] == count and count % LANES:
        lanes[-1, ..., count % LANES :] = number
        lanes[-1, ..., -1] = -number
    return value.like(lanes)


def softmax_reference(x):
    y = np.empty_like(x)
    for i, scores in enumerate(x):
        y[i] = [np.exp(s) / sum(np.exp(t) for t in scores) for s in scores]
    return y


def by_pixel(x):
    """Return an array (N, K, ...) as (N * pixels, K)."""
    return np.moveaxis(x, 1, -1).reshape(-1, x.shape[1])


def torch_functions():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    return torch, torch.nn.functional


class OpChecks:
    """Tests of every op. The subclass for a family of ops lists the family's cases and errors.

    The test file of a family must use the fixture `world` itself, because files that never name the
    fixture are skipped under mpirun.
    """

    cases = {}  # name: Case
    variants = ()  # names of cases that are tested only in slow cross-checks
    errors = ()  # (function of images (2, 4, 4), features (3,) and integers (), error, message)
    last_block_sizes = range(1, LANES)
    unused_lanes = 1e30

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            slow = {
                name: [pytest.mark.slow("ranks")] * (name in self.variants) for name in self.cases
            }
            metafunc.parametrize(
                "case", [pytest.param(c, id=n, marks=slow[n]) for n, c in self.cases.items()]
            )
        if "error" in metafunc.fixturenames:
            metafunc.parametrize("call, error, message", self.errors)

    @pytest.mark.slow_on_ranks
    @pytest.mark.parametrize("count", [5, 37])
    def test_against_the_reference_in_both_types(self, world, case, count):
        images, replicated = case.arrays(count)
        expected = case.reference(*images, *replicated)
        result, exact = gradients(world, case.op, share_of(world, images, replicated))
        np.testing.assert_allclose(result, expected, rtol=1e-12, atol=1e-13)
        rounded = gradients(world, case.op, case.arguments(world, count, np.float32))
        assert all(cotangent.dtype == np.float32 for cotangent in rounded[1])
        for single, double in zip([rounded[0], *rounded[1]], [expected, *exact], strict=True):
            assert single.shape == double.shape
            assert abs(single - double).max() <= 1e-5 * max(abs(double).max(), 1e-2)

    @pytest.mark.slow_on_ranks
    @pytest.mark.parametrize("count", [5, 37])
    def test_vjp_along_random_directions(self, world, case, count):
        dl.check_vjp(case.op, *case.arguments(world, count), seed=count, tolerance=2e-7)

    @pytest.mark.slow_on_ranks
    def test_last_blocks_of_every_size(self, world, case):
        for size in self.last_block_sizes:
            images, replicated = case.arrays(LANES + size)
            args = share_of(world, images, replicated)
            result, _ = gradients(world, case.op, args)
            expected = case.reference(*images, *replicated)
            np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-13)
            if size in (1, 7, 15):
                dl.check_vjp(case.op, *args, tolerance=1e-6)

    @pytest.mark.parametrize("count", [5, 37])
    def test_one_result_on_any_number_of_ranks(self, world, case, count):
        expected, result = (
            bytes_of_gradients(ranks, case.op, case.arguments(ranks, count, np.float32))
            for ranks in (SingleRank(), world)
        )
        assert result == expected

    @pytest.mark.slow_on_ranks
    def test_unused_lanes_do_not_matter(self, world, case):
        clean = case.arguments(world, 21, np.float32)
        dirty = [with_dirty_lanes(value, self.unused_lanes) for value in clean]
        with np.errstate(all="ignore"):
            result = bytes_of_gradients(world, case.op, dirty)
        assert result == bytes_of_gradients(world, case.op, clean)

    @pytest.mark.parametrize("dtype", ["f4", "f8"])
    def test_a_share_without_blocks(self, case, dtype):
        """An op works on a rank without blocks, without the help of other ranks."""
        images, replicated = case.arrays(5, dtype)
        batch = dl.share(5, IDLE_RANK)
        shares = [dl.from_images(array[:0], batch) for array in images]
        args = [dl.Var(share) if share.dtype.kind == "f" else share for share in shares]
        weights = [dl.Var(array) for array in replicated]
        y = case.op(*args, *weights)
        assert y.shape == np.shape(case.reference(*images, *replicated))
        if isinstance(y.value, dl.Blocked):
            dy = dl.from_images(np.zeros((0, *y.value.image_shape), dtype), batch)
        else:
            assert y.value.terms[0].nodes == []
            dy = np.ones(y.shape, dtype)
        cotangents = tape.backward(y, dy, fold=lambda partial: np.zeros(partial.shape))
        for variable in args:
            if isinstance(variable, dl.Var):
                assert cotangents[variable].lanes.shape == variable.value.lanes.shape
        for variable in weights:
            assert cotangents[variable].shape == variable.shape
            terms = getattr(cotangents[variable], "terms", [])  # [] if the sum was already folded
            assert all(term.nodes == [] for term in terms)

    def test_errors_say_what_was_expected(self, world, call, error, message):
        batch = dl.share(16 * world.size, world)
        arguments = (
            dl.from_images(np.zeros((16, *shape), dtype), batch)
            for shape, dtype in (((2, 4, 4), "f4"), ((3,), "f4"), ((), "i8"))
        )
        with pytest.raises(error, match=message):
            call(*arguments)
