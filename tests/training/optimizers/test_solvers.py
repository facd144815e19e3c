"""The solvers and clipping: against float64 loops, PyTorch, and the kernels against NumPy."""

import math
import typing

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.backends.reference import optimizer as reference_optimizer
from mpidl.errors import UserError
from mpidl.training.optimizers import SOLVERS, SolverName, WeightDecay, of_options
from mpidl.training.options.solver_options import SOLVER_NAMES

SHAPES = {"conv1.weight": (3, 1, 2, 2), "conv1.bias": (3,), "batchnorm1.gamma": (3,)}
ODD = [(), (1,), (17,), (3, 5), (128, 128), (16385,), (0, 4), (50_001,)]  # around a tile's size
DECAYS = [0.0, 0.1, 0.0, 0.01, 1e-4, 1e-10, 0.0, 0.5]
FACTORS = [1.0, 2.0, 0.5, 1.0, 1.0, 20.0, 1.0, 0.1]
# The numbers of each formula, and how many arrays of a parameter it keeps.
FORMULAS = {
    "sgdm": ([0.0123, 0.9], 1),
    "nesterov": ([0.0123, 0.9], 1),
    "adam": ([0.0123, 0.9, 1 - 0.9, 0.999, 1 - 0.999, 1e-8], 2),
    "adamw": ([0.0123, 0.9, 1 - 0.9, 0.999, 1 - 0.999, 1e-7, 0.3], 2),
    "rmsprop": ([0.0123, 0.999, 1 - 0.999, 1e-8], 1),
}
METHODS = ["l2norm", "global-l2norm", "absolute-value"]


def tables(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(s).astype(dtype) for name, s in SHAPES.items()}


def odd(seed, low=None):
    random = np.random.default_rng(seed)
    made = [random.standard_normal(s).astype(np.float32) for s in ODD]
    return made if low is None else [np.asarray(np.abs(a) + np.float32(low)) for a in made]


def awkward(arrays):
    """The same numbers: not aligned, not C-ordered, of another type."""
    found = list(arrays)
    found[3] = np.asfortranarray(found[3])
    found[4] = np.ascontiguousarray(found[4].T).T
    found[5] = found[5].astype(np.float64)
    found[7] = np.concatenate([[np.float32(0)], found[7]])[1:]
    return found


@needs_kernels
@pytest.mark.parametrize("formula", FORMULAS)
def test_the_kernel_makes_the_bytes_of_numpy(formula):
    numbers, tables = FORMULAS[formula]

    def step(backend):
        state = [odd(2), odd(3, 0.0)][2 - tables :]
        shared = state, numbers, DECAYS, FACTORS
        return [backend.optimizer_step(formula, odd(0), awkward(odd(1)), *shared), *state]

    expected = step(reference)
    for found in on_all_builds(lambda: step(cpu)).values():
        for one, other in zip(found, expected, strict=True):
            assert [np.asarray(a).tobytes() for a in one] == [
                np.asarray(a).tobytes() for a in other
            ]
            assert all(a.dtype == np.float32 for a in one)


@needs_kernels
@pytest.mark.parametrize("formula", FORMULAS)
def test_many_learnables_are_written_past_the_caches(formula):
    """Another way to memory, the same bytes; also of what does not fill a line."""
    random = np.random.default_rng(0)
    drawn = [[random.random(n, np.float32) for n in (1, 5, (1 << 22) + 19)] for _ in range(4)]
    numbers, tables = FORMULAS[formula]

    def step(backend):
        weights, gradients, *state = ([a.copy() for a in arrays] for arrays in drawn)
        shared = state[:tables], numbers, [0.0, 0.1, 0.01], [1.0, 2.0, 0.5]
        new = backend.optimizer_step(formula, weights, gradients, *shared)
        return [a.tobytes() for arrays in (new, *state) for a in arrays]

    expected = step(reference)
    assert all(found == expected for found in on_all_builds(lambda: step(cpu)).values())


def test_every_formula_is_tested():
    assert set(FORMULAS) == set(reference_optimizer.FORMULAS)


@needs_kernels
def test_a_kernel_refuses_another_number_of_arguments():
    ones = [np.ones(3, np.float32)]
    for formula, numbers, state in (
        ("adam", FORMULAS["sgdm"][0], [ones]),
        ("sgdm", FORMULAS["sgdm"][0], [ones, ones]),
        ("bogus", FORMULAS["sgdm"][0], [ones]),
    ):
        text = f"no kernel steps by {formula} with {len(numbers)} numbers and {len(state)} arrays"
        with pytest.raises(TypeError, match=text):
            cpu.optimizer_step(formula, ones, ones, state, numbers, [0.0])


@needs_kernels
@pytest.mark.parametrize("threshold", [0.5, 300.0, 1e9])
@pytest.mark.parametrize("method", METHODS)
def test_clipping_in_c_makes_the_bytes_of_numpy(method, threshold):
    """300 is between the norms of the arrays."""
    weights, gradients = odd(0), awkward(odd(1))
    expected = [
        np.asarray(a) for a in reference.clip(weights, gradients, DECAYS, method, threshold)
    ]
    for found in on_all_builds(
        lambda: cpu.clip(weights, gradients, DECAYS, method, threshold)
    ).values():
        assert [a.tobytes() for a in found] == [a.tobytes() for a in expected]
        assert [a.shape for a in found] == ODD


@pytest.mark.parametrize("backend", [reference, pytest.param(cpu, marks=needs_kernels)])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_visible(backend, bad):
    gradients = [np.ones(3, np.float32), np.ones(20, np.float32)]
    gradients[1][7] = bad
    for method in METHODS[:2]:
        found = backend.clip([np.zeros_like(g) for g in gradients], gradients, [0, 0], method, 1.0)
        assert not np.isfinite(found[1]).all()
        assert np.isfinite(found[0]).all() == (method == "l2norm" or bad == np.inf)


@pytest.mark.parametrize("method", METHODS)
def test_clipping_is_what_it_says(method):
    weights, gradients = odd(0), odd(1)
    found = reference.clip(weights, gradients, DECAYS, method, 2.0)
    whole = [
        g.astype(np.float64) + d * w for w, g, d in zip(weights, gradients, DECAYS, strict=True)
    ]
    if method == "absolute-value":
        expected = [np.clip(g, -2, 2) for g in whole]
    else:
        norms = [np.linalg.norm(g) for g in whole]
        if method == "global-l2norm":
            norms = [math.hypot(*norms)] * len(norms)
        expected = [g * min(1, 2 / max(n, 1e-300)) for g, n in zip(whole, norms, strict=True)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)


# ---- the optimizers ----


def loop(solver, steps, *, rate=0.01, decay=0.999, epsilon=1e-8, l2=0.0):
    """The same steps in float64, element by element."""
    weights = {name: array.astype(np.float64) for name, array in tables(0).items()}
    for name, weight in weights.items():
        for place in np.ndindex(weight.shape):
            w, m, v = float(weight[place]), 0.0, 0.0
            for t in range(1, steps + 1):
                g = float(tables(t)[name][place]) + (l2 * w if name.endswith(".weight") else 0)
                m, v = 0.9 * m + 0.1 * g, decay * v + (1 - decay) * g * g
                if solver == "adam":
                    corrected = rate * math.sqrt(1 - decay**t) / (1 - 0.9**t)
                    w -= corrected * m / (math.sqrt(v) + epsilon)
                else:
                    w -= rate * g / (math.sqrt(v) + epsilon)
            weight[place] = w
    return weights


def adamw_loop(rates, *, decay=0.01, epsilon=1e-8, factors=None, threshold=math.inf):
    """AdamW in float64, element by element, as its paper and PyTorch have it."""
    weights = {name: array.astype(np.float64) for name, array in tables(0).items()}
    for name, weight in weights.items():
        factor = (factors or {}).get(name, 1.0 if name.endswith(".weight") else 0.0)
        gradients = [tables(t)[name].astype(np.float64) for t in range(1, len(rates) + 1)]
        gradients = [g * min(1.0, threshold / np.linalg.norm(g)) for g in gradients]
        for place in np.ndindex(weight.shape):
            w, m, v = float(weight[place]), 0.0, 0.0
            for t, (rate, gradient) in enumerate(zip(rates, gradients, strict=True), 1):
                g = float(gradient[place])
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                mean, square = m / (1 - 0.9**t), v / (1 - 0.999**t)
                w -= rate * (mean / (math.sqrt(square) + epsilon) + decay * factor * w)
            weight[place] = w
    return weights


def stepped(optimizer, steps, dtype=np.float32, first=1):
    weights = tables(0, dtype)
    for t in range(first, first + steps):
        weights = optimizer(weights, tables(t, dtype))
    return weights


def distance(one, other):
    return max(np.abs(one[name] - other[name]).max() for name in SHAPES)


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_steps_are_those_of_a_float64_loop(l2):
    adam = dl.Adam(0.01, l2=l2)
    assert distance(stepped(adam, 5), loop("adam", 5, l2=l2)) < 1e-6
    rmsprop = dl.RMSProp(0.01, l2=l2)
    assert distance(stepped(rmsprop, 5), loop("rmsprop", 5, decay=0.9, l2=l2)) < 1e-6
    for optimizer in (dl.Adam(0.01, l2=l2), dl.RMSProp(0.01, 0.999, l2=l2)):
        double = stepped(optimizer, 5, np.float64)
        assert double["conv1.weight"].dtype == np.float64
    big = dl.Adam(0.01, epsilon=0.1, squared_gradient_decay_factor=0.99)
    assert distance(stepped(big, 3), loop("adam", 3, decay=0.99, epsilon=0.1)) < 1e-6


RATES = [0.1, 0.05, 0.05, 0.01, 0.2]


def at_rates(optimizer, rates, dtype=np.float32):
    weights = tables(0, dtype)
    for t, rate in enumerate(rates, 1):
        optimizer.learning_rate = rate
        weights = optimizer(weights, tables(t, dtype))
    return weights


@pytest.mark.parametrize("epsilon", [1e-8, 0.1])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.5])
def test_adamw_is_the_papers(decay, epsilon):
    """Also with a large epsilon, and at rates that change."""
    expected = adamw_loop(RATES, decay=decay, epsilon=epsilon)
    assert distance(at_rates(dl.AdamW(epsilon=epsilon, l2=decay), RATES), expected) < 1e-6
    double = at_rates(dl.AdamW(epsilon=epsilon, l2=decay), RATES, np.float64)
    assert distance(double, expected) < 1e-7  # whose gradients are float32
    coupled = at_rates(dl.Adam(epsilon=epsilon, l2=decay), RATES)
    assert distance(coupled, expected) > 1e-3 or decay == 0.0 and epsilon == 1e-8


def test_adamw_decays_by_the_factors_of_l2():
    factors = {"conv1.weight": 0.5, "conv1.bias": 2.0}
    ours = at_rates(dl.AdamW(l2=0.3, l2_factors=factors), RATES)
    assert distance(ours, adamw_loop(RATES, decay=0.3, factors=factors)) < 1e-6
    start = tables(0)
    zero = {name: np.zeros_like(array) for name, array in start.items()}
    rates = {"conv1.weight": 2.0, "batchnorm1.gamma": 0.0}
    ours = dl.AdamW(0.1, l2=0.3, learning_rate_factors=rates)(start, zero)
    np.testing.assert_allclose(ours["conv1.weight"], 0.94 * start["conv1.weight"], rtol=1e-6)
    assert ours["conv1.bias"].tobytes() == start["conv1.bias"].tobytes()
    assert ours["batchnorm1.gamma"] is start["batchnorm1.gamma"]
    with pytest.raises(ValueError, match="l2_factors: unknown parameter conv1.bia"):
        dl.AdamW(l2_factors={"conv1.bia": 1.0})(start, zero)


def test_adamw_clips_the_gradient_without_its_decay():
    ours = at_rates(dl.AdamW(l2=0.5, epsilon=0.1, gradient_threshold=0.5), RATES)
    expected = adamw_loop(RATES, decay=0.5, epsilon=0.1, threshold=0.5)
    assert distance(ours, expected) < 1e-6
    assert distance(adamw_loop(RATES, decay=0.5, epsilon=0.1), expected) > 1e-2


def test_pytorch_takes_the_steps_of_adamw():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for epsilon, decay in ((1e-8, 0.01), (0.1, 0.5)):
        weights = [torch.tensor(a) for a in tables(0, np.float64).values()]
        groups = [
            {"params": [w], "weight_decay": decay * name.endswith(".weight")}
            for name, w in zip(SHAPES, weights, strict=True)
        ]
        other = torch.optim.AdamW(groups, lr=0.1, eps=epsilon)
        for t, rate in enumerate(RATES, 1):
            for group in other.param_groups:
                group["lr"] = rate
            for w, g in zip(weights, tables(t, np.float64).values(), strict=True):
                w.grad = torch.tensor(g)
            other.step()
        ours = at_rates(dl.AdamW(epsilon=epsilon, l2=decay), RATES, np.float64)
        expected = dict(zip(SHAPES, (w.numpy() for w in weights), strict=True))
        assert distance(ours, expected) < 1e-12


@pytest.mark.parametrize("solver", ["adam", "rmsprop"])
def test_pytorch_takes_the_same_steps(solver):
    """Its Adam adds epsilon behind the correction: another form, but for a small epsilon."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def theirs(epsilon):
        weights = [torch.tensor(a) for a in tables(0, np.float64).values()]
        kind = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[solver]
        how = {"betas": (0.9, 0.999)} if solver == "adam" else {"alpha": 0.9}
        other = kind(weights, lr=0.01, eps=epsilon, **how)
        for t in range(1, 8):
            for w, g in zip(weights, tables(t, np.float64).values(), strict=True):
                w.grad = torch.tensor(g)
            other.step()
        return dict(zip(SHAPES, (w.numpy() for w in weights), strict=True))

    kind = {"adam": dl.Adam, "rmsprop": dl.RMSProp}[solver]
    assert distance(stepped(kind(0.01, epsilon=1e-15), 7, np.float64), theirs(1e-15)) < 1e-12
    found = distance(stepped(kind(0.01, epsilon=0.1), 7, np.float64), theirs(0.1))
    assert found < 1e-12 if solver == "rmsprop" else found > 1e-3


@pytest.mark.parametrize("kind", [dl.Adam, dl.AdamW, dl.RMSProp])
def test_going_on_from_its_state_makes_the_same_bytes(kind):
    whole = stepped(kind(), 3)
    first = kind()
    weights = stepped(first, 2)
    second = kind()
    second.load_state(first.state())
    weights = second(weights, tables(3))
    assert all(weights[name].tobytes() == whole[name].tobytes() for name in SHAPES)
    forgetful = kind()(stepped(kind(), 2), tables(3))
    assert distance(forgetful, whole) > 1e-4
    with pytest.raises(ValueError, match=f"the state of {kind.__name__} is .*found velocity.x"):
        kind().load_state({"velocity.x": np.zeros(1)})


def test_a_step_that_is_only_looked_at_does_not_count():
    adam = dl.Adam()
    assert adam.numbers() == adam.numbers() and adam.steps == 0
    stepped(adam, 2)
    assert adam.steps == 2 and adam.state()["steps"] == 2


def test_factors_of_the_learning_rate():
    zero = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    factors = {"conv1.bias": 3.0, "conv1.weight": 0.0}
    for kind in (dl.Adam, dl.AdamW, dl.RMSProp):
        plain = kind(0.01)(zero, tables(1))
        gradients = tables(1)
        del gradients["conv1.weight"]  # which stays, and needs none
        found = kind(0.01, learning_rate_factors=factors)(zero, gradients)
        np.testing.assert_allclose(found["conv1.bias"], 3 * plain["conv1.bias"], rtol=1e-6)
        assert found["conv1.weight"] is zero["conv1.weight"]
        assert np.array_equal(found["batchnorm1.gamma"], plain["batchnorm1.gamma"])


@pytest.mark.parametrize("method", METHODS)
def test_what_is_clipped_is_the_gradient_with_its_l2_term(method):
    how = {"gradient_threshold": 0.5, "gradient_threshold_method": method}
    found = dl.SGDM(1.0, 0.0, l2=0.1, **how)(tables(0), tables(1))
    clipped = reference.clip(
        list(tables(0).values()), list(tables(1).values()), [0.1, 0, 0], method, 0.5
    )
    for (name, weight), g in zip(tables(0).items(), clipped, strict=True):
        assert found[name].tobytes() == (weight + (0 * g - np.float32(1) * g)).tobytes()
    free = dl.SGDM(1.0, 0.0, l2=0.1)(tables(0), tables(1))
    wide = dl.SGDM(1.0, 0.0, l2=0.1, **how | {"gradient_threshold": 1e6})(tables(0), tables(1))
    assert all(wide[name].tobytes() == free[name].tobytes() for name in SHAPES)


def test_values_that_cannot_be_used():
    for call, text in (
        (lambda: dl.Adam(0), "learning_rate must be positive, found 0"),
        (lambda: dl.Adam(gradient_decay_factor=1), "gradient_decay_factor must be at least 0"),
        (lambda: dl.RMSProp(epsilon=0), "epsilon must be positive"),
        (lambda: dl.SGDM(gradient_threshold=0), "gradient_threshold must be positive"),
        (lambda: dl.SGDM(gradient_threshold_method="norm"), "must be l2norm, global-l2norm or"),
    ):
        with pytest.raises(UserError, match=text):
            call()
    assert (dl.Adam(None).learning_rate, dl.SGDM(None).learning_rate) == (0.001, 0.01)
    assert dl.RMSProp(squared_gradient_decay_factor=None).transforms[2].square_decay == 0.9


# ---- the registry ----


def test_solvers_are_declared_once():
    assert list(SOLVERS) == list(typing.get_args(SolverName))
    for name, solver in SOLVERS.items():
        assert getattr(dl, solver.__name__) is solver and solver.solver == name
        assert solver()._fused is not None
        assert all(solver.takes(option) for option in solver.defaults)
        built = of_options(dl.TrainingOptions(solver=name, l2=0.25))
        assert type(built) is solver and built.learning_rate == solver.defaults["learning_rate"]
        assert [part.l2 for part in built.transforms if isinstance(part, WeightDecay)] == [0.25]


def test_the_options_have_the_defaults_of_their_solver():
    assert dl.TrainingOptions().l2 == 1e-4 and dl.TrainingOptions(solver="adam").l2 == 1e-4
    assert dl.TrainingOptions(solver="rmsprop").squared_gradient_decay_factor == 0.9
    assert dl.TrainingOptions(solver="sgdm").squared_gradient_decay_factor is None
    assert set(SOLVER_NAMES) == {
        *(
            "learning_rate",
            "momentum",
            "nesterov",
            "gradient_decay_factor",
            "squared_gradient_decay_factor",
        ),
        "epsilon",
    }
    assert dl.TrainingOptions.from_recipe("cifar", solver="adam").l2 == 1e-10


def test_the_decay_of_a_recipe_belongs_to_its_solver():
    """Decoupled, it has another size."""
    assert dl.TrainingOptions(solver="adamw").l2 == dl.AdamW().transforms[2].l2 == 0.01
    assert dl.TrainingOptions.from_recipe("cifar", solver="adamw").l2 == 0.01
    assert dl.TrainingOptions.from_recipe("cifar", solver="adamw", l2=0.5).l2 == 0.5
