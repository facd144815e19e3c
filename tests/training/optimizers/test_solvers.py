"""Compare the solvers and clipping with float64 loops and PyTorch.

test_conformance.py tests the kernels.
"""

import math
import typing

import numpy as np
import pytest
from cpu_builds import needs_kernels, on_all_builds
from parameter_tables import SHAPES, distance, same_bytes, tables
from training_cases import FORMULAS

import mpidl as dl
from mpidl.backends import CPU as cpu
from mpidl.backends import REFERENCE as reference
from mpidl.errors import UserError
from mpidl.training.optimizers import SOLVERS, SolverName, WeightDecay, of_options
from mpidl.training.optimizers.solvers import SOLVER_NAMES

METHODS = ["l2norm", "global-l2norm", "absolute-value"]


@needs_kernels
@pytest.mark.parametrize(
    "formula",
    [pytest.param(name, marks=[pytest.mark.slow("ranks")] * (name != "sgdm")) for name in FORMULAS],
)
def test_large_parameters_have_the_bytes_of_numpy(formula):
    """Kernels update large arrays correctly with writes that bypass the caches.

    Only incomplete cache lines are written through the caches.
    """
    random = np.random.default_rng(0)
    arrays_of_step = [
        [random.random(n, np.float32) for n in (1, 5, (1 << 22) + 19)] for _ in range(4)
    ]
    numbers, lows = FORMULAS[formula]

    def step(backend):
        weights, gradients, *state = ([a.copy() for a in arrays] for arrays in arrays_of_step)
        shared = state[: len(lows)], numbers, [0.0, 0.1, 0.01], [1.0, 2.0, 0.5]
        new = backend.optimizer_step(formula, weights, gradients, *shared)
        return [a.tobytes() for arrays in (new, *state) for a in arrays]

    expected = step(reference)
    assert all(actual == expected for actual in on_all_builds(lambda: step(cpu)).values())


@needs_kernels
def test_a_kernel_refuses_a_wrong_number_of_arguments():
    ones = [np.ones(3, np.float32)]
    for formula, numbers, state in (
        ("adam", (0.1, 0.9), [ones]),
        ("sgdm", (0.1, 0.9), [ones, ones]),
        ("bogus", (0.1, 0.9), [ones]),
    ):
        counts = f"{len(numbers)} numbers and {len(state)} arrays"
        text = f"no kernel computes the step {formula} with {counts}"
        with pytest.raises(TypeError, match=text):
            cpu.optimizer_step(formula, ones, ones, state, numbers, [0.0])


@pytest.mark.parametrize("backend", [reference, pytest.param(cpu, marks=needs_kernels)])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_clipping_keeps_nan_and_infinities_visible(backend, number):
    gradients = [np.ones(3, np.float32), np.ones(20, np.float32)]
    gradients[1][7] = number
    for method in METHODS[:2]:
        weights = [np.zeros_like(g) for g in gradients]
        clipped = backend.clip(weights, gradients, [0, 0], method, 1.0)
        assert not np.isfinite(clipped[1]).all()
        assert np.isfinite(clipped[0]).all() == (method == "l2norm" or number == np.inf)


@pytest.mark.parametrize("method", METHODS)
def test_clipping_limits_norms_or_numbers(method):
    """Clipping by the reference backend agrees with NumPy in float64.

    The backend computes norms as sums over parts of 16384 numbers.
    """
    shapes, decays = [(), (17,), (3, 5), (16385,), (0, 4), (50_001,)], [0, 0.1, 0, 1e-4, 0, 0.5]
    random = np.random.default_rng(0)
    weights, gradients = ([random.standard_normal(s, np.float32) for s in shapes] for _ in "wg")
    weights, gradients = ([np.float32(a) for a in arrays] for arrays in (weights, gradients))
    decayed = [
        g.astype(np.float64) + d * w for w, g, d in zip(weights, gradients, decays, strict=True)
    ]
    norms = [np.linalg.norm(g) for g in decayed]
    threshold = 2.0
    if method == "absolute-value":
        expected = [np.clip(g, -threshold, threshold) for g in decayed]
    else:
        if method == "global-l2norm":
            norms = [math.hypot(*norms)] * len(norms)
        expected = [
            g * min(1, threshold / max(n, 1e-300)) for g, n in zip(decayed, norms, strict=True)
        ]
    clipped = reference.clip(weights, gradients, decays, method, threshold)
    for actual, exact in zip(clipped, expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-6, atol=1e-9)


# ---- the optimizers ----


def loop(solver, steps, *, rate=0.01, decay=0.999, epsilon=1e-8, l2=0.0):
    """Compute the steps in float64, element by element."""
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
    """Compute the steps of AdamW in float64, element by element, as in the AdamW paper."""
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


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_steps_are_those_of_a_float64_loop(l2):
    adam = dl.Adam(0.01, l2=l2)
    assert distance(stepped(adam, 5), loop("adam", 5, l2=l2)) < 1e-6
    rmsprop = dl.RMSProp(0.01, l2=l2)
    assert distance(stepped(rmsprop, 5), loop("rmsprop", 5, decay=0.9, l2=l2)) < 1e-6
    for optimizer in (dl.Adam(0.01, l2=l2), dl.RMSProp(0.01, 0.999, l2=l2)):
        double = stepped(optimizer, 5, np.float64)
        assert double["conv1.weight"].dtype == np.float64
    large_epsilon = dl.Adam(0.01, epsilon=0.1, squared_gradient_decay_factor=0.99)
    assert distance(stepped(large_epsilon, 3), loop("adam", 3, decay=0.99, epsilon=0.1)) < 1e-6


RATES = [0.1, 0.05, 0.05, 0.01, 0.2]


def at_rates(optimizer, rates, dtype=np.float32):
    weights = tables(0, dtype)
    for t, rate in enumerate(rates, 1):
        optimizer.learning_rate = rate
        weights = optimizer(weights, tables(t, dtype))
    return weights


@pytest.mark.parametrize("epsilon", [1e-8, 0.1])
@pytest.mark.parametrize("decay", [0.0, 0.01, 0.5])
def test_adamw_takes_the_steps_of_its_paper(decay, epsilon):
    """AdamW agrees with its paper, even with a large epsilon and changing learning rates."""
    expected = adamw_loop(RATES, decay=decay, epsilon=epsilon)
    assert distance(at_rates(dl.AdamW(epsilon=epsilon, l2=decay), RATES), expected) < 1e-6
    double = at_rates(dl.AdamW(epsilon=epsilon, l2=decay), RATES, np.float64)
    assert distance(double, expected) < 1e-7  # limited by the float32 gradients
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


def layerwise_loop(solver, rates, *, decay, coefficient=0.001, threshold=math.inf, names=None):
    """Compute the steps of LARS (algorithm 1) or LAMB (algorithm 2) in float64."""
    weights = {name: array.astype(np.float64) for name, array in tables(0).items()}
    for name, w in weights.items():
        is_scaled = name in (names or ["conv1.weight"])
        l2 = decay * is_scaled
        m = v = np.zeros(w.shape)
        for t, rate in enumerate(rates, 1):
            g = tables(t)[name].astype(np.float64)
            g *= min(1.0, threshold / np.linalg.norm(g))
            norm, ratio = np.linalg.norm(w), 1.0
            if solver == "lars":
                if is_scaled:
                    ratio = coefficient * norm / (np.linalg.norm(g) + l2 * norm)
                m = 0.9 * m + rate * ratio * (g + l2 * w)
                step = m
            else:
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                u = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + l2 * w
                if is_scaled:
                    ratio = norm / np.linalg.norm(u)
                step = rate * ratio * u
            w = w - step
        weights[name] = w
    return weights


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("solver", ["lars", "lamb"])
def test_layerwise_steps_are_those_of_the_papers(solver, decay):
    kind = {"lars": dl.LARS, "lamb": dl.LAMB}[solver]
    for threshold in (0.5, math.inf):
        options = {"l2": decay, "gradient_threshold": threshold}
        expected = layerwise_loop(solver, RATES, decay=decay, threshold=threshold)
        assert distance(at_rates(kind(**options), RATES), expected) < 1e-6
        assert distance(at_rates(kind(**options), RATES, np.float64), expected) < 2e-7
    plain = at_rates({"lars": dl.SGDM, "lamb": dl.AdamW}[solver](l2=decay), RATES)
    assert distance(plain, expected) > 1e-2
    ours = at_rates(kind(l2=decay, decay_exclude="none"), RATES)
    everything = layerwise_loop(solver, RATES, decay=decay, names=list(SHAPES))
    assert distance(ours, everything) < 1e-6
    if solver == "lars":
        ours = at_rates(kind(l2=decay, trust_coefficient=0.05), RATES)
        assert distance(ours, layerwise_loop(solver, RATES, decay=decay, coefficient=0.05)) < 1e-6


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lars_without_a_gradient_follows_the_paper(decay):
    """By equation 6, r = coefficient |w| / (|g| + decay |w|): w shrinks by rate * coefficient."""
    weights = tables(0)
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    optimizer, w = dl.LARS(0.5, l2=decay, trust_coefficient=0.02), weights
    expected, velocity = weights["conv1.weight"].astype(np.float64), 0.0
    for _ in range(4):
        w = optimizer(w, zeros)
        norm = np.linalg.norm(expected)
        ratio = 0.02 * norm / (0.0 + decay * norm) if decay else 1.0
        velocity = 0.9 * velocity - 0.5 * ratio * decay * expected
        expected = expected + velocity
    np.testing.assert_allclose(w["conv1.weight"], expected, rtol=1e-6)
    assert np.array_equal(w["conv1.bias"], weights["conv1.bias"])
    assert np.array_equal(w["conv1.weight"], weights["conv1.weight"]) == (not decay)
    started = dl.LARS(0.5, l2=decay)(zeros, weights)  # zero weights take a step of SGD
    np.testing.assert_allclose(started["conv1.weight"], -0.5 * weights["conv1.weight"], rtol=1e-6)


def test_what_decays():
    """`decay_exclude` excludes learnables from the decay. Layers' factors multiply the decay.

    The default factor of 0 for a bias or a norm parameter does not prevent decay.
    """
    names = ["conv1.weight", "conv1.bias", "batchnorm1.gamma", "batchnorm1.beta"]
    layers = [dl.Conv2D(3, 2, weight_l2_factor=0.5), dl.BatchNorm(), dl.Dense(2)]
    factors = dl.Network(layers, (1, 4, 4)).factors["l2_factors"]
    decaying = {
        exclude: [WeightDecay(1.0, factors, exclude).factor(name) for name in names]
        for exclude in ("biases-and-norms", "biases", "none")
    }
    assert decaying == {
        "biases-and-norms": [0.5, 0, 0, 0],
        "biases": [0.5, 0, 1, 1],
        "none": [0.5, 1, 1, 1],
    }
    with pytest.raises(UserError, match="decay_exclude must be biases-and-norms, biases or none"):
        dl.SGDM(decay_exclude="all")


def test_without_exclusions_pytorch_decays_the_same_learnables():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    weights = [torch.tensor(a) for a in tables(0, np.float64).values()]
    other = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.3)
    for t in range(1, 6):
        for w, g in zip(weights, tables(t, np.float64).values(), strict=True):
            w.grad = torch.tensor(g)
        other.step()
    expected = dict(zip(SHAPES, (w.numpy() for w in weights), strict=True))
    ours = stepped(dl.SGDM(0.1, l2=0.3, decay_exclude="none"), 5, np.float64)
    assert distance(ours, expected) < 1e-12
    assert distance(stepped(dl.SGDM(0.1, l2=0.3), 5, np.float64), expected) > 1e-2


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
def test_pytorch_takes_the_steps_of_adam_and_rmsprop(solver):
    """The solvers agree with PyTorch, except for Adam with a large epsilon.

    PyTorch's Adam adds epsilon after the bias correction.
    """
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def pytorch(epsilon):
        weights = [torch.tensor(a) for a in tables(0, np.float64).values()]
        kind = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}[solver]
        options = {"betas": (0.9, 0.999)} if solver == "adam" else {"alpha": 0.9}
        other = kind(weights, lr=0.01, eps=epsilon, **options)
        for t in range(1, 8):
            for w, g in zip(weights, tables(t, np.float64).values(), strict=True):
                w.grad = torch.tensor(g)
            other.step()
        return dict(zip(SHAPES, (w.numpy() for w in weights), strict=True))

    kind = {"adam": dl.Adam, "rmsprop": dl.RMSProp}[solver]
    assert distance(stepped(kind(0.01, epsilon=1e-15), 7, np.float64), pytorch(1e-15)) < 1e-12
    error = distance(stepped(kind(0.01, epsilon=0.1), 7, np.float64), pytorch(0.1))
    assert error < 1e-12 if solver == "rmsprop" else error > 1e-3


@pytest.mark.parametrize("kind", [dl.Adam, dl.AdamW, dl.RMSProp])
def test_a_restored_state_gives_the_same_bytes(kind):
    uninterrupted = stepped(kind(), 3)
    first = kind()
    weights = stepped(first, 2)
    second = kind()
    second.load_state(first.state())
    weights = second(weights, tables(3))
    assert same_bytes(weights, uninterrupted)
    forgetful = kind()(stepped(kind(), 2), tables(3))
    assert distance(forgetful, uninterrupted) > 1e-4
    with pytest.raises(
        ValueError, match=f"the state of {kind.__name__} contains unknown array velocity.x"
    ):
        kind().load_state({"velocity.x": np.zeros(1)})


def test_reading_the_numbers_of_a_step_does_not_count_it():
    adam = dl.Adam()
    assert adam.numbers() == adam.numbers() and adam.steps == 0
    stepped(adam, 2)
    assert adam.steps == 2 and adam.state()["steps"] == 2


def test_learning_rates_have_factors():
    zero = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    factors = {"conv1.bias": 3.0, "conv1.weight": 0.0}
    for kind in (dl.Adam, dl.AdamW, dl.RMSProp):
        plain = kind(0.01)(zero, tables(1))
        gradients = tables(1)
        del gradients["conv1.weight"]  # not needed, because the factor is 0
        stepped_weights = kind(0.01, learning_rate_factors=factors)(zero, gradients)
        np.testing.assert_allclose(
            stepped_weights["conv1.bias"], 3 * plain["conv1.bias"], rtol=1e-6
        )
        assert stepped_weights["conv1.weight"] is zero["conv1.weight"]
        assert np.array_equal(stepped_weights["batchnorm1.gamma"], plain["batchnorm1.gamma"])


@pytest.mark.parametrize("method", METHODS)
def test_the_gradient_is_clipped_with_its_l2_term(method):
    options = {"gradient_threshold": 0.5, "gradient_threshold_method": method}
    stepped_weights = dl.SGDM(1.0, 0.0, l2=0.1, **options)(tables(0), tables(1))
    clipped = reference.clip(
        list(tables(0).values()), list(tables(1).values()), [0.1, 0, 0], method, 0.5
    )
    for (name, weight), g in zip(tables(0).items(), clipped, strict=True):
        assert stepped_weights[name].tobytes() == (weight + (0 * g - np.float32(1) * g)).tobytes()
    unclipped = dl.SGDM(1.0, 0.0, l2=0.1)(tables(0), tables(1))
    options["gradient_threshold"] = 1e6
    assert same_bytes(dl.SGDM(1.0, 0.0, l2=0.1, **options)(tables(0), tables(1)), unclipped)


def test_wrong_options_are_refused():
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
        assert getattr(dl, solver.__name__) is solver
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
        *("epsilon", "trust_coefficient"),
    }
    assert dl.TrainingOptions.from_recipe("cifar", solver="adam").l2 == 1e-10


def test_the_decay_of_a_recipe_belongs_to_its_solver():
    """If the solver changes, the recipe's decay is dropped, because its scale differs."""
    assert dl.TrainingOptions(solver="adamw").l2 == dl.AdamW().transforms[2].l2 == 0.01
    assert dl.TrainingOptions.from_recipe("cifar", solver="adamw").l2 == 0.01
    assert dl.TrainingOptions.from_recipe("cifar", solver="adamw", l2=0.5).l2 == 0.5
