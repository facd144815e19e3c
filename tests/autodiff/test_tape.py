"""The tape: gradients of functions that a user writes, with learnables in a dict or a network."""

import gc
import weakref

import numpy as np
import pytest
from single_rank import SingleRank, assert_slopes, blocked, finite_differences, numbers

import mpidl as dl
from mpidl.autodiff import tape

COUNTS = (5, 37, 64)  # one block, so that ranks idle; a ragged last block; four full ones


def bytes_of(result):
    """The bytes of a loss and of gradients that were added up."""
    loss, gradients = result[:2]
    return np.asarray(loss).tobytes(), {name: g.tobytes() for name, g in gradients.items()}


# models: what a user's loss may do with its learnables, in float64 or float32


def two_layers(p, x, y):
    """Nothing special: two dense layers."""
    h = dl.relu(dl.dense(dl.flatten(x), p["w1"], p["b1"]))
    return dl.mean_squared_error(dl.dense(h, p["w2"], p["b2"]), y)


def penalty(p, x, y):
    """An L2 penalty: replicated, so that it counts once however many ranks there are."""
    return two_layers(p, x, y) + 0.05 * (dl.total(p["w1"] ** 2) + dl.total(p["w2"] ** 2))


def tied(p, x, y):
    """An autoencoder whose second layer is the first one's transpose."""
    x = dl.flatten(x)
    h = dl.dense(x, p["w1"], p["b1"])
    return dl.mean_squared_error(dl.dense(h * h, dl.transpose(p["w1"]), p["b3"]), x)


def weight_normalized(p, x, y):
    """Salimans and Kingma, "Weight normalization", 2016: w = g * v / |v|, by filter."""
    norm = dl.sqrt(dl.total(p["v"] ** 2, axis=(1, 2, 3)))
    w = p["v"] * dl.reshape(p["g"] / norm, (4, 1, 1, 1))
    h = dl.conv2d(x, w, p["bias"], padding=1)
    return dl.mean_squared_error(h, dl.relu(h) * 0.5)


def scaled_loss(p, x, y):
    """The loss times a learnable: its Partial meets a replicated number."""
    return two_layers(p, x, y) * dl.exp(p["s"]) - p["s"]


MODELS = {f.__name__: f for f in (two_layers, penalty, tied, weight_normalized, scaled_loss)}
SHAPES = {
    "two_layers": {"w1": (7, 18), "b1": (7,), "w2": (3, 7), "b2": (3,)},
    "penalty": {"w1": (7, 18), "b1": (7,), "w2": (3, 7), "b2": (3,)},
    "tied": {"w1": (7, 18), "b1": (7,), "b3": (18,)},
    "weight_normalized": {"v": (4, 2, 3, 3), "g": (4,), "bias": (4,)},
    "scaled_loss": {"w1": (7, 18), "b1": (7,), "w2": (3, 7), "b2": (3,), "s": ()},
}


def learnables(model, dtype=np.float64):
    return {n: numbers(f"{model} {n}", *s, dtype=dtype) for n, s in SHAPES[model].items()}


def data(world, count, dtype=np.float64):
    return blocked(
        world,
        numbers("images", count, 2, 3, 3, dtype=dtype),
        numbers("targets", count, 3, dtype=dtype),
    )


@pytest.mark.parametrize("model", MODELS)
def test_gradients_against_finite_differences(world, model):
    f, p = MODELS[model], learnables(model)
    images, targets = data(world, 37)
    loss, gradients = dl.value_and_grad(f, reduce=world)(p, images, targets)

    def at(parameters):
        return world.gplus(f(parameters, images, targets))

    assert loss.shape == () and loss == pytest.approx(at(p), rel=1e-14)
    assert list(gradients) == list(p)
    assert_slopes(gradients, finite_differences(at, p, max_elements=12))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("model", MODELS)
def test_one_result_on_any_number_of_ranks(world, model, count):
    """The ranks of this session, with and without reduce, against one rank that has all images."""
    f, p = MODELS[model], learnables(model, np.float32)
    alone = SingleRank()
    expected = dl.value_and_grad(f)(p, *data(alone, count, np.float32))
    expected = bytes_of((alone.gplus(expected[0]), alone.gplus(expected[1])))
    mine = data(world, count, np.float32)
    loss, gradients = dl.value_and_grad(f)(p, *mine)
    assert isinstance(loss, dl.Partial)
    assert all(isinstance(g, dl.Partial) for g in gradients.values())
    assert bytes_of((world.gplus(loss), world.gplus(gradients))) == expected
    assert bytes_of(dl.value_and_grad(f, reduce=world)(p, *mine)) == expected
    for name, gradient in gradients.items():
        assert gradient.shape == p[name].shape and gradient.dtype == np.float32


def test_a_vjp_of_parts_of_a_sum_would_give_another_result():
    """Why a Partial is folded before the vjp of a replicated op: the negative control of the test
    above. The vjp of w -> w * w applied to two nodes of dw, then added, rounds otherwise than
    applied to their sum."""
    w = numbers("w", 1000, dtype=np.float32)
    left, right = (numbers(side, 1000, dtype=np.float32) for side in "ab")
    assert (2 * w * left + 2 * w * right).tobytes() != (2 * w * (left + right)).tobytes()


def small_network():
    return dl.Network(
        [dl.Conv2D(3, 4, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Dense(3)], (2, 3, 3), seed=4
    )


@pytest.mark.parametrize("count", COUNTS)
def test_a_network_gives_its_state_too(world, count):
    def model_loss(net, images, targets):
        assert net.training
        scores = net(images)
        return dl.mean_squared_error(scores, targets), dl.mean(scores), "a note"

    def run(world, reduce=None):
        net = small_network()
        made = dl.value_and_grad(model_loss, reduce=reduce)(net, *data(world, count, np.float32))
        assert net.state["batchnorm1.mean"].tolist() == [0] * 4  # the network is left as it was
        (loss, scores, note), gradients, state = made
        assert note == "a note" and list(state) == list(net.state)
        assert list(gradients) == list(net.parameters)
        scores = scores if reduce else world.gplus(scores)
        loss, gradients = (loss, gradients) if reduce else world.gplus((loss, gradients))
        statistics = {name: value.tobytes() for name, value in state.items()}
        return bytes_of((loss, gradients)), scores.tobytes(), statistics

    expected = run(SingleRank())
    assert run(world) == expected
    assert run(world, reduce=world) == expected


def test_gradients_come_in_the_order_of_the_tape_and_progress_is_called(world):
    x, y = data(world, 37)
    leaves = {name: dl.Var(v, name=name) for name, v in learnables("two_layers").items()}
    loss = two_layers(leaves, x, y)
    happened = []
    tape.backward(
        loss,
        np.ones(()),
        on_ready=lambda leaf, gradient: happened.append((leaf.name, type(gradient))),
        progress=lambda: happened.append("vjp"),
    )
    ready = [h[0] for h in happened if h != "vjp"]
    assert ready == ["w2", "b2", "w1", "b1"]  # the last layer's first, each once
    # final gradients are handed over at once, not at the end: other vjps run between
    assert happened == [
        "vjp",  # mean squared error
        ("w2", dl.Partial),
        ("b2", dl.Partial),
        "vjp",  # dense
        "vjp",  # relu
        ("w1", dl.Partial),
        ("b1", dl.Partial),
        "vjp",  # dense; flatten has nothing to differentiate
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
    # two sums each, kept apart until they are folded
    assert [(name, terms) for name, terms, _ in ready] == [("w", 2), ("b", 2)]
    assert world.gplus(ready[0][2]).shape == (4, 4)


def test_saved_arrays_are_freed_as_they_are_used(world):
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
    # relu's vjp reads h, and has run when w1 is ready
    assert alive == {"w2": True, "w1": False}
    assert h.value is None and saved() is None


def test_a_tape_is_played_once(world):
    x, y = data(world, 20)
    leaves = {name: dl.Var(v, name=name) for name, v in learnables("two_layers").items()}
    loss = two_layers(leaves, x, y)
    tape.backward(loss, np.ones(()))
    with pytest.raises(RuntimeError, match="already played back"):
        tape.backward(loss, np.ones(()))


# ops a user writes


def make_affine(seen):
    @dl.op
    def affine(x, scale, shift):
        """x * scale + shift, one block at a time."""
        seen.append(x.shape)
        assert x.flags.c_contiguous
        y = x * scale + shift
        return y, lambda dy: (dy * scale, (dy * x).sum(axis=0), dy.sum(axis=0))

    return affine


@pytest.mark.parametrize("count", COUNTS)
def test_an_op_of_ones_own_sees_one_block_at_a_time(world, count):
    def run(world, seen):
        x, y = data(world, count, np.float32)
        affine = make_affine(seen)

        def loss(p, x, y):
            return dl.mean_squared_error(affine(x, p["scale"], p["shift"]), dl.relu(x))

        p = {n: numbers(n, 2, 3, 3, dtype=np.float32) for n in ("scale", "shift")}
        value, gradients = dl.value_and_grad(loss)(p, x, y)
        return bytes_of((world.gplus(value), world.gplus(gradients))), x.batch

    seen = []
    found, batch = run(world, seen)
    # one call for each block; a rank without one learns y's shape from an image of zeros
    rows = batch.counts().tolist() or [1]
    assert seen == [(n, 2, 3, 3) for n in rows]
    assert found == run(SingleRank(), [])[0]


@pytest.mark.parametrize("count", COUNTS)
def test_check_vjp_passes_a_right_op_and_catches_wrong_ones(world, count):
    x = blocked(world, numbers("images", count, 3))
    scale, shift = numbers("scale", 3), numbers("shift", 3)
    assert dl.check_vjp(make_affine([]), x, scale, shift) < 1e-8

    def wrong(change):
        @dl.op
        def affine(x, scale, shift):
            dx, dscale, dshift = 1.0, 1.0, 1.0
            dx, dscale, dshift = change(dx, dscale, dshift)
            return x * scale + shift, lambda dy: (
                dy * scale * dx,
                (dy * x).sum(axis=0) * dscale,
                None if dshift is None else dy.sum(axis=0) * dshift,
            )

        return affine

    for change in (
        lambda dx, ds, dt: (1.01, ds, dt),
        lambda dx, ds, dt: (dx, -ds, dt),
        lambda dx, ds, dt: (dx, ds, None),
    ):
        with pytest.raises(AssertionError, match="vjp of affine: .* relative difference"):
            dl.check_vjp(wrong(change), x, scale, shift)


def run_op(world, op, count=64):
    x = blocked(world, numbers("images", count, 3))
    return dl.value_and_grad(lambda p, x: dl.mean_squared_error(op(x, p["w"]), x))(
        {"w": numbers("w", 3)}, x
    )


def test_a_wrong_vjp_is_told_by_name_and_shape(world):
    count = 16 * world.size  # one block each, so that every rank notices

    @dl.op
    def short(x, w):
        return x * w, lambda dy: (dy * w,)

    with pytest.raises(ValueError, match="short: its vjp must return a tuple of 2 .* got 1"):
        run_op(world, short, count)

    @dl.op
    def bare(x, w):
        return x * w, lambda dy: dy * w

    with pytest.raises(ValueError, match="bare: .* tuple of 2 cotangents, .* got no tuple"):
        run_op(world, bare, count)

    @dl.op
    def unsummed(x, w):
        return x * w, lambda dy: (dy * w, dy * x)

    with pytest.raises(
        ValueError, match=r"unsummed: cotangent of shape \(16, 3\) for argument 1 of shape \(3,\)"
    ):
        run_op(world, unsummed, count)

    @dl.op
    def summed(x, w):
        return (x * w).sum(), lambda dy: (dy * w, None)

    with pytest.raises(ValueError, match=r"summed: expected one result per image, .* dl\.mean"):
        run_op(world, summed, count)


def test_options_and_replicated_ops_of_ones_own(world):
    @dl.op
    def power_of(w, *, exponent):
        return float((w**exponent).sum()), lambda dy: (dy * exponent * w ** (exponent - 1),)

    w = numbers("w", 5, low=0.5, dtype=np.float32)
    loss, gradients = dl.value_and_grad(lambda p: power_of(p["w"], exponent=3))({"w": w})
    # replicated: each rank has it whole, and adding up over the ranks does not count it again
    assert world.gplus(loss) == pytest.approx((w**3).sum(), rel=1e-6)
    np.testing.assert_allclose(world.gplus(gradients)["w"], 3 * w**2, rtol=1e-6)
    assert world.gplus(gradients)["w"].dtype == np.float32


# what is refused, and how it is told


def test_a_loss_is_one_number(world):
    x = blocked(world, numbers("images", 20, 3))
    w = {"w": numbers("w", 3)}
    for f in (lambda p, x: x * p["w"], lambda p, x: dl.mean(x * p["w"]), lambda p, x: p["w"]):
        with pytest.raises(TypeError, match=r"a loss must be one number, .* dl\.mean"):
            dl.value_and_grad(f)(w, x)
    for value, text in (None, "None"), ("0.5", "'0.5'"), (np.zeros(3), r"array\(\[0"):
        with pytest.raises(TypeError, match=f"a loss must be one number, got {text}"):
            dl.value_and_grad(lambda p, x, value=value: value)(w, x)


def test_what_a_mean_leaves_is_told(world):
    w = {"w": numbers("w", 3)}
    x, y = blocked(world, numbers("images", 20, 3)), blocked(world, numbers("y", 20))
    text = r"shapes \(\) and \(3,\): dl.mean and dl.sum go over the images and leave"
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
        dl.value_and_grad(f)(learnables("two_layers"), x, y)


def test_numpy_does_not_see_values_that_are_differentiated(world):
    def f(p):
        return np.sum(np.asarray(p["w"]) ** 2)

    with pytest.raises(TypeError, match="'w' is being differentiated"):
        dl.value_and_grad(f)({"w": np.ones(3)})


def test_values_of_two_mini_batches_do_not_mix(world):
    x, y = (blocked(world, numbers("images", 20, 3)) for _ in range(2))
    for mix in (dl.add, dl.multiply):
        with pytest.raises(ValueError, match="different mini-batches"):
            mix(x, y)


def test_where_no_world_is_known_it_is_asked_for(world):
    """The images come by closure, so that nobody knows which ranks the tied weight's sum is over:
    an error, or with reduce=world the right gradient."""
    x, y = data(world, 20)
    p = learnables("tied")
    with pytest.raises(TypeError, match="reduce=world"):
        dl.value_and_grad(lambda p: tied(p, x, y))(p)
    found = dl.value_and_grad(lambda p: tied(p, x, y), reduce=world)(p)
    assert bytes_of(found) == bytes_of(dl.value_and_grad(tied, reduce=world)(p, x, y))


# sums, types, and what is not used


def test_a_constant_sum_takes_part_in_the_loss(world):
    """A Partial that nothing is differentiated through, scaled by and added to learnables."""
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


@pytest.mark.parametrize("count", COUNTS)
def test_gradients_have_the_type_of_their_learnables(world, count):
    """float64 targets and factors under float32 learnables: no rank may guess another type."""

    def f(p, x, y):
        loss = two_layers(p, x, y) * dl.exp(p["s"])
        return loss + dl.mean_squared_error(dl.relu(x) * p["k"], x) * np.float64(0.1)

    p = learnables("scaled_loss", np.float32) | {"k": numbers("k", 3, dtype=np.float32)}
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


def test_what_is_not_used_has_a_gradient_of_zero(world):
    x, y = data(world, 20)
    p = learnables("two_layers") | {"spare": np.ones((2, 3), np.float32)}
    for reduce in (None, world):
        _, gradients = dl.value_and_grad(two_layers, reduce=reduce)(p, x, y)
        spare = world.gplus(gradients["spare"]) if reduce is None else gradients["spare"]
        assert spare.tolist() == [[0] * 3] * 2 and spare.dtype == np.float32
    loss, gradients = dl.value_and_grad(lambda p: np.float64(3))({"w": np.ones(2)})
    assert world.gplus(loss) == 3 and world.gplus(gradients)["w"].tolist() == [0, 0]
