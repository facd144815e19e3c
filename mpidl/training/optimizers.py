"""Optimizers: replicated parameters and gradients in, new parameters out.

Every rank computes the same step from the same bytes, element by element; nothing is exchanged.
"""

import abc
import math

import numpy as np

from mpidl import backends
from mpidl.training.options import training_options


class Optimizer(abc.ABC):
    """What all optimizers share: factors of parameters, clipping, state.

    l2: added to the gradient as l2 * factor * w. The factor is 1 for the parameters whose names end
    in ".weight" and 0 for all others (biases, gamma, beta); l2_factors, {name: factor}, overrides.

    learning_rate_factors: {name: factor}, 1 where it has no name: what the learning rate of a
    parameter is multiplied by. One of factor 0 stays as it is, and needs no gradient. The factors
    that a network's layers have are `net.factors`: SGDM(0.01, **net.factors).

    gradient_threshold, gradient_threshold_method: gradients, the L2 term included, are made no
    larger than the threshold before the step, as MATLAB's trainingOptions of these names say:
    "l2norm" scales each parameter's gradient down to that norm, "global-l2norm" all of them to that
    norm of all together, "absolute-value" cuts each number off. Norms are summed in float64, in one
    order.
    """

    solver = ""  # as the option `solver` calls it
    tables: tuple[str, ...] = ()  # what is kept of each parameter from step to step

    def __init__(
        self,
        learning_rate,
        l2,
        l2_factors,
        learning_rate_factors,
        gradient_threshold,
        gradient_threshold_method,
    ):
        learning_rate = training_options.check("learning_rate", learning_rate)
        default = training_options.BY_SOLVER["learning_rate"][self.solver]
        self.learning_rate = default if learning_rate is None else learning_rate
        self.l2 = training_options.check("l2", l2)
        self.l2_factors = dict(l2_factors or {})
        self.learning_rate_factors = dict(learning_rate_factors or {})
        self.gradient_threshold = training_options.check("gradient_threshold", gradient_threshold)
        self.gradient_threshold_method = training_options.check(
            "gradient_threshold_method", gradient_threshold_method
        )
        self.kept = {table: {} for table in self.tables}  # {table: {parameter: array}}

    def __call__(self, parameters, gradients):
        """One step. Both are {name: array}; returns new arrays, and leaves these as they are.

        The arithmetic has the parameter's precision, float32. Raises ValueError where names or
        shapes do not match.
        """
        return self.apply(parameters, gradients, self.advance())

    def numbers(self):
        """{name: number} of the next step: what may differ from step to step."""
        return {"learning_rate": self.learning_rate}

    def advance(self):
        """Count a step; returns its `numbers`."""
        return self.numbers()

    def apply(self, parameters, gradients, numbers):
        """The step by these numbers, which may be one that is only recorded; see `__call__`."""
        for table in ("l2_factors", "learning_rate_factors"):
            for name in getattr(self, table):
                if name not in parameters:
                    hint = training_options.nearest(name, parameters)
                    raise ValueError(f"{table}: unknown parameter {name}{hint}")
        moving = self._moving(parameters)
        _match("gradients", gradients, moving, parameters)
        for table, arrays in self.kept.items():
            if arrays:
                _match(f"{table} arrays", arrays, moving, parameters)
        self.prepare(parameters)
        weights, gradients = list(moving.values()), [gradients[name] for name in moving]
        kept = [[arrays[name] for name in moving] for arrays in self.kept.values()]
        backend = backends.of_type(np.float64)
        if weights and all(a.dtype == np.float32 for arrays in (weights, *kept) for a in arrays):
            backend = backends.of_array(weights[0])
        decays = [self.l2 * self._factor(name) for name in moving]
        if self.gradient_threshold < math.inf:
            how = self.gradient_threshold_method, self.gradient_threshold
            gradients, decays = backend.clip(weights, gradients, decays, *how), [0.0] * len(weights)
        factors = [self.learning_rate_factors.get(name, 1.0) for name in moving]
        stepped = self._step(backend, weights, gradients, kept, numbers, decays, factors)
        return parameters | dict(zip(moving, stepped, strict=True))

    @abc.abstractmethod
    def _step(self, backend, weights, gradients, kept, numbers, decays, factors):
        """The new weights, by the backend."""

    def _moving(self, parameters):
        """Those of the parameters that are stepped at all."""
        factors = self.learning_rate_factors
        return {name: w for name, w in parameters.items() if factors.get(name, 1.0) != 0}

    def prepare(self, parameters):
        """Have what is kept where the parameters lie: zeros before the first step."""
        for arrays in self.kept.values():
            for name, w in self._moving(parameters).items():
                if name not in arrays:
                    arrays[name] = backends.of_array(w).zeros_like(w)
                elif isinstance(arrays[name], np.ndarray) and not isinstance(w, np.ndarray):
                    arrays[name] = backends.of_array(w).from_numpy(arrays[name], w)

    def _factor(self, name):
        return self.l2_factors.get(name, 1.0 if name.endswith(".weight") else 0.0)

    def state(self):
        """{name: array} of all that a checkpoint needs beside the options."""
        return {
            f"{table}.{name}": np.array(array)
            for table, arrays in self.kept.items()
            for name, array in arrays.items()
        }

    def load_state(self, state):
        """Take what `state` gave. Raises ValueError for anything else."""
        kept = {table: {} for table in self.tables}
        for name, array in state.items():
            table, _, parameter = name.partition(".")
            if table not in kept or not parameter:
                tables = " and ".join(self.tables)
                raise ValueError(f"the state of {type(self).__name__} is {tables}, found {name}")
            kept[table][parameter] = np.array(array, order="C")
        self.kept = kept


class SGDM(Optimizer):
    """Stochastic gradient descent with momentum, in MATLAB's form (sgdmupdate).

        v <- momentum * v - learning_rate * g,    w <- w + v

    PyTorch has v <- momentum * v + g, w <- w - learning_rate * v. At a constant rate both make the
    same steps; after a change of the rate, here the steps kept by the momentum are still those of
    the old rate, there they are scaled to the new one at once.

    The other arguments: see `Optimizer`.
    """

    solver, tables = "sgdm", ("velocity",)

    def __init__(
        self,
        learning_rate=0.01,
        momentum=0.9,
        l2=0.0,
        l2_factors=None,
        learning_rate_factors=None,
        *,
        gradient_threshold=math.inf,
        gradient_threshold_method="l2norm",
    ):
        clipping = gradient_threshold, gradient_threshold_method
        super().__init__(learning_rate, l2, l2_factors, learning_rate_factors, *clipping)
        self.momentum = training_options.check("momentum", momentum)

    @property
    def velocity(self):
        """{parameter: array}; none before the first step."""
        return self.kept["velocity"]

    def numbers(self):
        return {"learning_rate": self.learning_rate, "momentum": self.momentum}

    def _step(self, backend, weights, gradients, kept, numbers, decays, factors):
        rates = numbers["learning_rate"], numbers["momentum"]
        return backend.sgdm(weights, gradients, *kept, *rates, decays, factors)


class Adam(Optimizer):
    """Adaptive moment estimation, in MATLAB's form (adamupdate).

        m <- gradient_decay_factor * m + (1 - gradient_decay_factor) * g
        v <- squared_gradient_decay_factor * v + (1 - squared_gradient_decay_factor) * g^2
        w <- w - rate * m / (sqrt(v) + epsilon)

    with rate = learning_rate * sqrt(1 - squared_gradient_decay_factor^t) / (1 -
    gradient_decay_factor^t) in step t. Kingma and Ba, "Adam: a method for stochastic optimization",
    2015, algorithm 1 with the order of computation of the end of its section 2, as MATLAB has it;
    PyTorch adds epsilon after the correction of v, the same where epsilon is small beside sqrt(v).

    The other arguments: see `Optimizer`.
    """

    solver, tables = "adam", ("mean", "square")

    def __init__(
        self,
        learning_rate=0.001,
        gradient_decay_factor=0.9,
        squared_gradient_decay_factor=0.999,
        epsilon=1e-8,
        l2=0.0,
        l2_factors=None,
        learning_rate_factors=None,
        *,
        gradient_threshold=math.inf,
        gradient_threshold_method="l2norm",
    ):
        clipping = gradient_threshold, gradient_threshold_method
        super().__init__(learning_rate, l2, l2_factors, learning_rate_factors, *clipping)
        self.gradient_decay_factor = training_options.check(
            "gradient_decay_factor", gradient_decay_factor
        )
        self.squared_gradient_decay_factor = _squared_decay(self, squared_gradient_decay_factor)
        self.epsilon = training_options.check("epsilon", epsilon)
        self.steps = 0  # that were taken

    def numbers(self):
        step = self.steps + 1
        mean, square = (
            1 - _power(decay, step)
            for decay in (self.gradient_decay_factor, self.squared_gradient_decay_factor)
        )
        return {"learning_rate": self.learning_rate * math.sqrt(square) / mean}

    def advance(self):
        numbers = self.numbers()
        self.steps += 1
        return numbers

    def _step(self, backend, weights, gradients, kept, numbers, decays, factors):
        decay = self.gradient_decay_factor, self.squared_gradient_decay_factor, self.epsilon
        how = numbers["learning_rate"], *decay, decays, factors
        return backend.adam(weights, gradients, *kept, *how)

    def state(self):
        return {"steps": np.array(self.steps, np.int64), **super().state()}

    def load_state(self, state):
        state = dict(state)
        steps = int(state.pop("steps", 0))
        super().load_state(state)
        self.steps = steps


class RMSProp(Optimizer):
    """Steps divided by the root of the moving mean of the gradient's square (MATLAB's
    rmspropupdate).

        v <- squared_gradient_decay_factor * v + (1 - squared_gradient_decay_factor) * g^2
        w <- w - learning_rate * g / (sqrt(v) + epsilon)

    Tieleman and Hinton, "Neural networks for machine learning", lecture 6.5, 2012.

    The other arguments: see `Optimizer`.
    """

    solver, tables = "rmsprop", ("square",)

    def __init__(
        self,
        learning_rate=0.001,
        squared_gradient_decay_factor=0.9,
        epsilon=1e-8,
        l2=0.0,
        l2_factors=None,
        learning_rate_factors=None,
        *,
        gradient_threshold=math.inf,
        gradient_threshold_method="l2norm",
    ):
        clipping = gradient_threshold, gradient_threshold_method
        super().__init__(learning_rate, l2, l2_factors, learning_rate_factors, *clipping)
        self.squared_gradient_decay_factor = _squared_decay(self, squared_gradient_decay_factor)
        self.epsilon = training_options.check("epsilon", epsilon)

    def _step(self, backend, weights, gradients, kept, numbers, decays, factors):
        decay = self.squared_gradient_decay_factor, self.epsilon
        how = numbers["learning_rate"], *decay, decays, factors
        return backend.rmsprop(weights, gradients, *kept, *how)


def of_options(known, **factors):
    """The optimizer that TrainingOptions name; factors: the network's."""
    shared = {
        "learning_rate": known.learning_rate,
        "l2": known.l2,
        "gradient_threshold": known.gradient_threshold,
        "gradient_threshold_method": known.gradient_threshold_method,
        **factors,
    }
    if known.solver == "sgdm":
        return SGDM(momentum=known.momentum, **shared)
    shared["squared_gradient_decay_factor"] = known.squared_gradient_decay_factor
    shared["epsilon"] = known.epsilon
    if known.solver == "rmsprop":
        return RMSProp(**shared)
    return Adam(gradient_decay_factor=known.gradient_decay_factor, **shared)


def _squared_decay(optimizer, value):
    name = "squared_gradient_decay_factor"
    value = training_options.check(name, value)
    return training_options.BY_SOLVER[name][optimizer.solver] if value is None else value


def _power(base, exponent):
    """base ** exponent by multiplications alone: C libraries round pow() each in its own way."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


def _match(what, tables, moving, parameters):
    """Raise ValueError unless `tables` has an array for each of the parameters that move, of its
    shape, and none that is no parameter's."""
    missing = [name for name in moving if name not in tables]
    unknown = [name for name in tables if name not in parameters]
    if missing or unknown:
        wrong = [f"missing {n}" for n in missing] + [f"unknown {n}" for n in unknown]
        frozen = " (where its layer is frozen, give the optimizer **net.factors)"
        hint = frozen if missing and what == "gradients" else ""
        raise ValueError(f"{what} do not match the parameters: {', '.join(wrong)}{hint}")
    for name, weight in moving.items():
        if np.shape(tables[name]) != weight.shape:
            found = np.shape(tables[name])
            raise ValueError(f"{what} of {name}: expected shape {weight.shape}, found {found}")
