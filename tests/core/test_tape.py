"""Test the tape: gradients of custom functions with learnables in a dict or a network."""

import gc
import weakref

import numpy as np
import pytest
from single_rank import SingleRank, assert_slopes, blocked, finite_differences, numbers

import mpidl as dl
from mpidl.core import tape

# Numbers of images: a single block, a partly filled last block, and four full blocks.
COUNTS = (5, 37, 64)
each_count = pytest.mark.parametrize("count", COUNTS)


def bytes_of(result):
    """Return the bytes of a loss and of gradients that are summed over the ranks."""
    loss, gradients = result[:2]
    return np.asarray(loss).tobytes(), {name: g.tobytes() for name, g in gradients.items()}


# Models in float64 or float32. Each uses its learnables in a different way.


def two_layers(p, x, y):
    """Return the loss of two dense layers."""
    h = dl.relu(dl.dense(dl.flatten(x), p["w1"], p["b1"]))
    return dl.mean_squared_error(dl.dense(h, p["w2"], p["b2"]), y)


def penalty(p, x, y):
    """Return a loss with an L2 penalty, which is replicated, so it is added only once."""
    return two_layers(p, x, y) + 0.05 * (dl.total(p["w1"] ** 2) + dl.total(p["w2"] ** 2))


def tied(p, x, y):
    """Return the loss of an autoencoder whose second layer is the first one's transpose."""
    x = dl.flatten(x)
    h = dl.dense(x, p["w1"], p["b1"])
    return dl.mean_squared_error(dl.dense(h * h, dl.transpose(p["w1"]), p["b3"]), x)


def weight_normalized(p, x, y):
    """Return a loss with weight normalization (Salimans and Kingma, 2016): w = g * v / |v|."""
    norm = dl.sqrt(dl.total(p["v"] ** 2, axis=(1, 2, 3)))
    w = p["v"] * dl.reshape(p["g"] / norm, (4, 1, 1, 1))
    h = dl.conv2d(x, w, p["bias"], padding=1)
    return dl.mean_squared_error(h, dl.relu(h) * 0.5)


def scaled_loss(p, x, y):
    """Return the loss times a learnable, so a Partial meets a replicated number."""
    return two_layers(p, x, y) * dl.exp(p["s"]) - p["s"]


DENSE = {"w1": (7, 18), "b1": (7,), "w2": (3, 7), "b2": (3,)}
SHAPES = {  # shapes of the learnables of each model
    two_layers: DENSE,
    penalty: DENSE,
    tied: {"w1": (7, 18), "b1": (7,), "b3": (18,)},
    weight_normalized: {"v": (4, 2, 3, 3), "g": (4,), "bias": (4,)},
    scaled_loss: {**DENSE, "s": ()},
}
each_model = pytest.mark.parametrize("model", SHAPES, ids=lambda model: model.__name__)


def learnables(model, dtype=np.float64):
    return {
        name: numbers(f"{model.__name__} {name}", *shape, dtype=dtype)
        for name, shape in SHAPES[model].items()
    }


def data(world, count, dtype=np.float64):
    return blocked(
        world,
        numbers("images", count, 2, 3, 3, dtype=dtype),
        numbers("targets", count, 3, dtype=dtype),
    )


@pytest.mark.slow_on_ranks
@each_model
def test_gradients_against_finite_differences(world, model):
    p, batch = learnables(model), data(world, 37)
    loss, gradients = dl.value_and_grad(model, reduce=world)(p, *batch)

    def loss_at(parameters):
        return world.gplus(model(parameters, *batch))

    assert loss.shape == () and loss == pytest.approx(loss_at(p), rel=1e-14)
    assert list(gradients) == list(p)
    assert_slopes(gradients, finite_differences(loss_at, p, max_elements=12))


@each_count
@each_model
def test_one_result_on_any_number_of_ranks(world, model, count):
    """The session's ranks compute the same bytes as a single rank, with and without `reduce`."""
    p, single = learnables(model, np.float32), SingleRank()
    expected = dl.value_and_grad(model)(p, *data(single, count, np.float32))
    expected = bytes_of(single.gplus(expected))
    batch = data(world, count, np.float32)
    loss, gradients = dl.value_and_grad(model)(p, *batch)
    assert isinstance(loss, dl.Partial)
    assert all(isinstance(g, dl.Partial) for g in gradients.values())
    assert bytes_of(world.gplus((loss, gradients))) == expected
    assert bytes_of(dl.value_and_grad(model, reduce=world)(p, *batch)) == expected
    for name, gradient in gradients.items():
        assert gradient.shape == p[name].shape and gradient.dtype == np.float32


def test_a_vjp_of_parts_of_a_sum_would_give_another_result():
    """Negative control of the test above: a Partial must be folded before a replicated vjp.

    Adding the vjps of w -> w * w for two nodes of dw rounds differently from the vjp for their sum.
    """
    w = numbers("w", 1000, dtype=np.float32)
    left, right = (numbers(side, 1000, dtype=np.float32) for side in "ab")
    assert (2 * w * left + 2 * w * right).tobytes() != (2 * w * (left + right)).tobytes()


@each_count
def test_a_step_of_a_network_returns_its_new_state(world, count):
    def model_loss(net, images, targets):
        assert net.training
        scores = net(images)
        return dl.mean_squared_error(scores, targets), dl.mean(scores), "a note"

    layers = [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)]

    def run(world, reduce=None):
        net = dl.Network(layers, (2, 3, 3), seed=4)
        results, gradients, state = dl.value_and_grad(model_loss, reduce=reduce)(
            net, *data(world, count, np.float32)
        )
        assert net.state["batchnorm1.mean"].tolist() == [0] * 4  # the step changes no net
        loss, scores, note = results
        assert note == "a note" and list(state) == list(net.state)
        assert list(gradients) == list(net.parameters)
        scores = scores if reduce else world.gplus(scores)
        loss, gradients = (loss, gradients) if reduce else world.gplus((loss, gradients))
        statistics = {name: value.tobytes() for name, value in state.items()}
        return bytes_of((loss, gradients)), scores.tobytes(), statistics

    expected = run(SingleRank())
    assert run(world) == expected
    assert run(world, reduce=world) == expected


def loss_of_leaves(world, count):
    leaves = {name: dl.Var(v, name=name) for name, v in learnables(two_layers).items()}
    return two_layers(leaves, *data(world, count))


def test_gradients_come_in_the_order_of_the_tape_and_progress_is_called(world):
    events = []
    tape.backward(
        loss_of_leaves(world, 37),
        np.ones(()),
        on_ready=lambda leaf, gradient: events.append((leaf.name, type(gradient))),
        progress=lambda: events.append("vjp"),
    )
    # each gradient is reported once, as soon as it is final, starting at the last layer
    assert events == [
        "vjp",  # mean squared error
        ("w2", dl.Partial),
        ("b2", dl.Partial),
        "vjp",  # dense
        "vjp",  # relu
        ("w1", dl.Partial),
        ("b1", dl.Partial),
        "vjp",  # dense; flatten needs no vjp, because the images need no gradient
    ]


def test_a_learnable_used_twice_is_ready_after_its_last_use(world):
    x = blocked(world, numbers("images", 20, 4))
    w, b = dl.Var(numbers("square", 4, 4), name="w"), dl.Var(numbers("b", 4), name="b")
    inner = dl.dense(x, w, b)
    loss = dl.mean_squared_error(dl.dense(inner, w, b), x)
    ready = []
    assert not tape.backward(
        loss, np.ones(()), on_ready=lambda leaf, g: ready.append((leaf.name, len(g.terms), g))
    )
    # two sums per gradient, which stay separate until they are folded
    assert [(name, terms) for name, terms, _ in ready] == [("w", 2), ("b", 2)]
    assert world.gplus(ready[0][2]).shape == (4, 4)


def test_saved_arrays_are_freed_after_their_last_use(world):
    x = blocked(world, numbers("images", 64, 8))
    w1, w2 = (dl.Var(numbers(n, 8, 8), name=n) for n in ("w1", "w2"))
    zero = np.zeros(8)
    h = dl.relu(dl.dense(x, w1, zero))
    loss = dl.mean_squared_error(dl.relu(dl.dense(h, w2, zero)), x)
    saved = weakref.ref(h.value.lanes)
    gc.collect()
    alive = {}
    tape.backward(
        loss, np.ones(()), on_ready=lambda leaf, g: alive.update({leaf.name: saved() is not None})
    )
    # the vjp of relu reads h and runs before w1's gradient is ready
    assert alive == {"w2": True, "w1": False}
    assert h.value is None and saved() is None


def test_a_tape_is_played_once(world):
    loss = loss_of_leaves(world, 20)
    tape.backward(loss, np.ones(()))
    with pytest.raises(RuntimeError, match="already played back"):
        tape.backward(loss, np.ones(()))


# custom ops


def make_affine(shapes):
    @dl.op
    def affine(x, scale, shift):
        """Compute x * scale + shift, one block at a time."""
        shapes.append(x.shape)
        assert x.flags.c_contiguous
        y = x * scale + shift
        return y, lambda dy: (dy * scale, (dy * x).sum(axis=0), dy.sum(axis=0))

    return affine


@each_count
def test_a_custom_op_computes_one_block_at_a_time(world, count):
    def run(world, shapes):
        x, y = data(world, count, np.float32)
        affine = make_affine(shapes)

        def loss(p, x, y):
            return dl.mean_squared_error(affine(x, p["scale"], p["shift"]), dl.relu(x))

        p = {n: numbers(n, 2, 3, 3, dtype=np.float32) for n in ("scale", "shift")}
        value, gradients = dl.value_and_grad(loss)(p, x, y)
        return bytes_of((world.gplus(value), world.gplus(gradients))), x.batch

    shapes = []
    result, batch = run(world, shapes)
    # one call for each block; a rank without blocks learns y's shape from an image of zeros
    rows = batch.counts().tolist() or [1]
    assert shapes == [(n, 2, 3, 3) for n in rows]
    assert result == run(SingleRank(), [])[0]


@each_count
def test_check_vjp_passes_a_right_op_and_catches_wrong_ones(world, count):
    x = blocked(world, numbers("images", count, 3))
    scale, shift = numbers("scale", 3), numbers("shift", 3)
    assert dl.check_vjp(make_affine([]), x, scale, shift) < 1e-8

    def wrong_affine(x_factor, scale_factor, shift_factor):
        @dl.op
        def affine(x, scale, shift):
            return x * scale + shift, lambda dy: (
                dy * scale * x_factor,
                (dy * x).sum(axis=0) * scale_factor,
                None if shift_factor is None else dy.sum(axis=0) * shift_factor,
            )

        return affine

    for factors in (1.01, 1, 1), (1, -1, 1), (1, 1, None):
        with pytest.raises(AssertionError, match="vjp of affine: .* relative difference"):
            dl.check_vjp(wrong_affine(*factors), x, scale, shift)


def short(x, w):
    return x * w, lambda dy: (dy * w,)


def bare(x, w):
    return x * w, lambda dy: dy * w


def unsummed(x, w):
    return x * w, lambda dy: (dy * w, dy * x)


def summed(x, w):
    return (x * w).sum(), lambda dy: (dy * w, None)


@pytest.mark.parametrize(
    "function, message",
    [
        (short, "short: its vjp must return a tuple of 2 .* got 1"),
        (bare, "bare: .* tuple of 2 cotangents, .* got no tuple"),
        (
            unsummed,
            r"unsummed: cotangent of shape \(16, 3\) for argument 1 of shape \(3,\)",
        ),
        (summed, r"summed: expected one result per image, .* dl\.mean"),
    ],
)
def test_the_error_of_a_wrong_vjp_names_the_op_and_the_shapes(world, function, message):
    op = dl.op(function)
    x = blocked(world, numbers("images", 16 * world.size, 3))  # all ranks have a block: all raise
    with pytest.raises(ValueError, match=message):
        dl.value_and_grad(lambda p, x: dl.mean_squared_error(op(x, p["w"]), x))(
            {"w": numbers("w", 3)}, x
        )


def test_custom_replicated_ops_and_their_options(world):
    @dl.op
    def power_of(w, *, exponent):
        return float((w**exponent).sum()), lambda dy: (dy * exponent * w ** (exponent - 1),)

    w = numbers("w", 5, low=0.5, dtype=np.float32)
    loss, gradients = dl.value_and_grad(lambda p: power_of(p["w"], exponent=3))({"w": w})
    # a replicated value is the same on every rank, and gplus counts it once
    assert world.gplus(loss) == pytest.approx((w**3).sum(), rel=1e-6)
    np.testing.assert_allclose(world.gplus(gradients)["w"], 3 * w**2, rtol=1e-6)
    assert world.gplus(gradients)["w"].dtype == np.float32


# errors


def test_a_loss_is_one_number(world):
    x = blocked(world, numbers("images", 20, 3))
    w = {"w": numbers("w", 3)}
    for f in (lambda p, x: x * p["w"], lambda p, x: dl.mean(x * p["w"]), lambda p, x: p["w"]):
        with pytest.raises(TypeError, match=r"a loss must be a single number, .* dl\.mean"):
            dl.value_and_grad(f)(w, x)
    for value, text in (None, "None"), ("0.5", "'0.5'"), (np.zeros(3), r"array\(\[0"):
        with pytest.raises(TypeError, match=f"a loss must be a single number, got {text}"):
            dl.value_and_grad(lambda p, x, value=value: value)(w, x)


def test_the_error_of_a_loss_of_several_numbers_explains_means(world):
    w = {"w": numbers("w", 3)}
    x, y = blocked(world, numbers("images", 20, 3)), blocked(world, numbers("y", 20))
    text = r"shapes \(\) and \(3,\): dl.mean and dl.sum reduce over the images"
    with pytest.raises(ValueError, match=text):
        dl.value_and_grad(lambda p, x, y: dl.mean(y) + 0.1 * dl.mean((x * p["w"]) ** 2))(w, x, y)


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: loss**2,
        lambda loss: dl.exp(loss),
        lambda loss: dl.log(loss),
        lambda loss: 1.0 / loss,
        lambda loss: loss * loss,
        lambda loss: dl.total(loss),
    ],
)
def test_a_nonlinear_function_of_a_sum_is_refused(world, use):
    x, y = data(world, 20)

    def f(p, x, y):
        return use(two_layers(p, x, y))

    with pytest.raises(TypeError, match="gplus|dl.sum and dl.mean"):
        dl.value_and_grad(f)(learnables(two_layers), x, y)


def test_numpy_refuses_values_that_are_differentiated(world):
    def f(p):
        return np.sum(np.asarray(p["w"]) ** 2)

    with pytest.raises(TypeError, match="'w' is being differentiated"):
        dl.value_and_grad(f)({"w": np.ones(3)})


def test_values_of_two_mini_batches_do_not_mix(world):
    x, y = (blocked(world, numbers("images", 20, 3)) for _ in range(2))
    for mix in (dl.add, dl.multiply):
        with pytest.raises(ValueError, match="different mini-batches"):
            mix(x, y)


def test_a_tied_weight_needs_images_as_arguments_or_reduce(world):
    """The tape cannot tell which ranks share a weight's sum if images come from a closure."""
    x, y = data(world, 20)
    p = learnables(tied)
    with pytest.raises(TypeError, match="reduce=world"):
        dl.value_and_grad(lambda p: tied(p, x, y))(p)
    result = dl.value_and_grad(lambda p: tied(p, x, y), reduce=world)(p)
    assert bytes_of(result) == bytes_of(dl.value_and_grad(tied, reduce=world)(p, x, y))


# sums, types, unused learnables


def test_a_constant_sum_takes_part_in_the_loss(world):
    """A Partial that is not differentiated can be scaled by learnables and added to them."""
    values = numbers("values", 37)
    x = blocked(world, values)

    def f(p, x):
        return dl.mean(x) * p["a"] + p["b"] - dl.mean(x) / p["c"]

    p = {"a": np.array(2.0), "b": np.array(3.0), "c": np.array(4.0)}
    loss, gradients = dl.value_and_grad(f, reduce=world)(p, x)
    m = values.mean()
    assert loss == pytest.approx(2 * m + 3 - m / 4, rel=1e-12)
    assert gradients["a"] == pytest.approx(m, rel=1e-12)
    assert gradients["b"] == 1
    assert gradients["c"] == pytest.approx(m / 16, rel=1e-12)


@each_count
def test_gradients_have_the_type_of_their_learnables(world, count):
    """Gradients of float32 learnables are float32, even with float64 targets and factors."""

    def f(p, x, y):
        loss = two_layers(p, x, y) * dl.exp(p["s"])
        return loss + dl.mean_squared_error(dl.relu(x) * p["k"], x) * np.float64(0.1)

    p = learnables(scaled_loss, np.float32) | {"k": numbers("k", 3, dtype=np.float32)}
    x, y = blocked(
        world,
        numbers("images", count, 2, 3, 3, dtype=np.float32),
        numbers("targets", count, 3, dtype=np.float64),
    )
    loss, gradients = dl.value_and_grad(f)(p, x, y)
    added = world.gplus(gradients)
    assert world.gplus(loss).dtype == np.float64
    for name, value in p.items():
        assert gradients[name].dtype == added[name].dtype == np.float32
        assert added[name].shape == value.shape


def test_unused_learnables_have_a_gradient_of_zero(world):
    x, y = data(world, 20)
    p = learnables(two_layers) | {"spare": np.ones((2, 3), np.float32)}
    for reduce in (None, world):
        _, gradients = dl.value_and_grad(two_layers, reduce=reduce)(p, x, y)
        spare = world.gplus(gradients["spare"]) if reduce is None else gradients["spare"]
        assert spare.tolist() == [[0] * 3] * 2 and spare.dtype == np.float32
    loss, gradients = dl.value_and_grad(lambda p: np.float64(3))({"w": np.ones(2)})
    assert world.gplus(loss) == 3 and world.gplus(gradients)["w"].tolist() == [0, 0]
