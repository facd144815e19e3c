"""Optimizers: replicated parameters and gradients in, new parameters out.

Every rank computes the same step from the same bytes, element by element; nothing is exchanged.
"""

import numpy as np

from mpidl import backends
from mpidl.training import options


class SGDM:
    """Stochastic gradient descent with momentum, in MATLAB's form.

        v <- momentum * v - learning_rate * g,    w <- w + v

    PyTorch has v <- momentum * v + g, w <- w - learning_rate * v. At a constant rate both make the
    same steps; after a change of the rate, here the steps kept by the momentum are still those of
    the old rate, there they are scaled to the new one at once.

    l2: added to the gradient as l2 * factor * w. The factor is 1 for the parameters whose names end
    in ".weight" and 0 for all others (biases, gamma, beta); l2_factors, {name: factor}, overrides.

    learning_rate_factors: {name: factor}, 1 where it has no name: what the learning rate of a
    parameter is multiplied by. One of factor 0 stays as it is, and needs no gradient. The factors
    that a network's layers have are `net.factors`: SGDM(0.01, **net.factors).
    """

    def __init__(
        self, learning_rate=0.01, momentum=0.9, l2=0.0, l2_factors=None, learning_rate_factors=None
    ):
        self.learning_rate = options.check("learning_rate", learning_rate)
        self.momentum = options.check("momentum", momentum)
        self.l2 = options.check("l2", l2)
        self.l2_factors = dict(l2_factors or {})
        self.learning_rate_factors = dict(learning_rate_factors or {})
        self.velocity = {}  # {parameter: array}; none before the first step

    def __call__(self, parameters, gradients):
        """One step. Both are {name: array}; returns new arrays, and leaves these as they are.

        The arithmetic has the parameter's precision, float32. Raises ValueError where names or
        shapes do not match.
        """
        for table in ("l2_factors", "learning_rate_factors"):
            for name in getattr(self, table):
                if name not in parameters:
                    hint = options.nearest(name, parameters)
                    raise ValueError(f"{table}: unknown parameter {name}{hint}")
        moving = self._moving(parameters)
        _match("gradients", gradients, moving, parameters)
        if self.velocity:
            _match("velocities", self.velocity, moving, parameters)
        weights = list(moving.values())
        self.prepare(parameters)
        single = all(w.dtype == np.float32 for w in (*weights, *self.velocity.values()))
        backend = backends.of_type(np.float64)
        if weights and single:
            backend = backends.of_array(weights[0])
        stepped = backend.sgdm(
            weights,
            [gradients[name] for name in moving],
            [self.velocity[name] for name in moving],
            self.learning_rate,
            self.momentum,
            [self.l2 * self._factor(name) for name in moving],
            [self.learning_rate_factors.get(name, 1.0) for name in moving],
        )
        return parameters | dict(zip(moving, stepped, strict=True))

    def _moving(self, parameters):
        """Those of the parameters that are stepped at all."""
        factors = self.learning_rate_factors
        return {name: w for name, w in parameters.items() if factors.get(name, 1.0) != 0}

    def prepare(self, parameters):
        """Have velocities where the parameters lie: zero before the first step."""
        moving = self._moving(parameters)
        for name, w in moving.items():
            if name not in self.velocity:
                self.velocity[name] = backends.of_array(w).zeros_like(w)
        for name, w in moving.items():
            v = self.velocity.get(name)
            if isinstance(v, np.ndarray) and not isinstance(w, np.ndarray):
                self.velocity[name] = w.backend.placed(v, w)

    def _factor(self, name):
        return self.l2_factors.get(name, 1.0 if name.endswith(".weight") else 0.0)

    def state(self):
        """{name: array} of all that a checkpoint needs beside the options."""
        return {f"velocity.{name}": np.array(array) for name, array in self.velocity.items()}

    def load_state(self, state):
        """Take what `state` gave. Raises ValueError for anything else."""
        velocity = {}
        for name, array in state.items():
            table, _, parameter = name.partition(".")
            if table != "velocity" or not parameter:
                raise ValueError(f"the state of SGDM is its velocity, found {name}")
            velocity[parameter] = np.array(array, order="C")
        self.velocity = velocity


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
