"""The solvers: optimizers that the option `solver` selects, each a chain of transforms.

A new solver needs a class here, and its name in `SolverName`, `SOLVERS` and `__all__`. The choices
and the help text of `--solver`, the defaults that depend on the solver and the documentation are
derived from the classes.
"""

import functools
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import Field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypedDict

import numpy as np

from mpidl.matlab_names import explain_arguments
from mpidl.options.declaration import (
    choice,
    declared,
    default_text,
    either,
    options_class,
    parameter_text,
)
from mpidl.training.optimizers.adam import AdamMoments, CorrectedAdamMoments
from mpidl.training.optimizers.chain import Optimizer
from mpidl.training.optimizers.layerwise import LambTrustRatio, LarsTrustRatio
from mpidl.training.optimizers.options import DECLARED, SolverOptions
from mpidl.training.optimizers.rmsprop import RMSPropMoment
from mpidl.training.optimizers.sgdm import momentum_of
from mpidl.training.optimizers.transforms import BIASES_AND_NORMS, Clip, Rate, WeightDecay

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidl.training.optimizers.transforms import Transform
    from mpidl.training.options.training_options import TrainingOptions

__all__ = ["SGDM", "Adam", "AdamW", "RMSProp", "LARS", "LAMB"]
SolverName: TypeAlias = Literal["sgdm", "adam", "adamw", "rmsprop", "lars", "lamb"]

Factors: TypeAlias = Mapping[str, float] | None


class Shared(TypedDict, total=False):
    """The keywords of `_decay_and_clip`, which all solvers have."""

    gradient_threshold: float
    gradient_threshold_method: str
    decay_exclude: str


def _decay_and_clip(
    l2: float,
    l2_factors: Factors,
    *,
    gradient_threshold: float = math.inf,
    gradient_threshold_method: str = "l2norm",
    decay_exclude: str = BIASES_AND_NORMS,
) -> tuple[WeightDecay, Clip]:
    """Return the two transforms that are part of all solvers."""
    clip = Clip(gradient_threshold, gradient_threshold_method)
    return WeightDecay(l2, l2_factors, decay_exclude), clip


# Replaces `**shared` in the signature of a constructor, and explains wrong arguments.
_solver_arguments = functools.partial(explain_arguments, passed_to=_decay_and_clip)


class Solver(Optimizer):
    """Base class of optimizers that the option `solver` selects.

    Each parameter of a solver's constructor has the name of an option that the solver uses, except
    for `l2_factors` and `learning_rate_factors`.

    Attributes
    ----------
    title : str
        Name of the solver in help texts.
    defaults : dict
        {option: value} for options whose default depends on the solver.
    decouples_decay : bool
        Whether weight decay (`l2`) is decoupled: applied to the update, as in AdamW, rather than
        added to the gradient.
    """

    title: ClassVar[str]
    defaults: ClassVar[dict[str, float]] = {"learning_rate": 0.001, "l2": 1e-4}
    decouples_decay: ClassVar[bool] = False

    def __init__(
        self,
        learning_rate: float | None,
        *transforms: "Transform",
        learning_rate_factors: Factors = None,
    ) -> None:
        rate = self.value("learning_rate", learning_rate)
        super().__init__(rate, *transforms, learning_rate_factors=learning_rate_factors)

    @classmethod
    def takes(cls, option: str) -> bool:
        """Return whether the solver uses an option.

        Parameters
        ----------
        option : str
            Name of a training option, such as "momentum".

        Returns
        -------
        bool
            True if the constructor has a parameter of this name.
        """
        return option in inspect.signature(cls).parameters

    @classmethod
    def of_options(cls, options: "TrainingOptions", **factors: Factors) -> "Solver":
        """Create the solver from training options and a network's factors.

        Parameters
        ----------
        options : TrainingOptions
            The options. Options that the solver does not use are ignored.
        **factors
            Per-parameter multipliers `l2_factors` and `learning_rate_factors`, usually
            `**net.factors`.

        Returns
        -------
        Solver
            The optimizer, with the learning rate of the options.
        """
        names = [name for name in inspect.signature(cls).parameters if hasattr(options, name)]
        arguments: dict[str, Any] = {name: getattr(options, name) for name in names}
        return cls(**arguments | factors)

    @classmethod
    def value(cls, name: str, value: float | None) -> float:
        """Return an argument of the constructor, or the solver's default if it is None.

        Parameters
        ----------
        name : str
            Name of the argument.
        value : float or None
            Value of the argument.

        Returns
        -------
        float
            The value that the solver uses.
        """
        return cls.defaults[name] if value is None else value


class SGDM(Solver):
    """Stochastic gradient descent with momentum, in the form of MATLAB's sgdmupdate.

        v <- momentum * v - learning_rate * g,    w <- w + v

    Nesterov's momentum adds momentum * v - learning_rate * g with the updated v instead; see
    `NesterovMomentum`. The L2 term is added to g before the gradient is clipped.

    Notes
    -----
    PyTorch computes v <- momentum * v + g, w <- w - learning_rate * v. With a constant learning
    rate, both forms give the same steps. If the rate changes, PyTorch applies the new rate to all
    gradients accumulated in v. In this solver, each gradient in v keeps the rate of its own step.
    """

    title = "SGD with momentum"
    defaults = Solver.defaults | {"learning_rate": 0.01}

    @_solver_arguments
    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.9,
        l2: float = 0.0,
        l2_factors: Factors = None,
        learning_rate_factors: Factors = None,
        *,
        nesterov: bool | Literal["on", "off"] = False,
        **shared: "Unpack[Shared]",
    ) -> None:
        decay, clip = _decay_and_clip(l2, l2_factors, **shared)
        chain = decay, clip, Rate(), momentum_of(momentum, nesterov)
        super().__init__(learning_rate, *chain, learning_rate_factors=learning_rate_factors)

    @property
    def velocity(self) -> dict[str, np.ndarray]:
        """The velocities v, {parameter: array}; empty before the first step."""
        return self.state_arrays["velocity"]


class Adam(Solver):
    """Adaptive moment estimation in the form of MATLAB's adamupdate; see `AdamMoments`.

        w <- w - learning_rate * correction * m / (sqrt(v) + epsilon)

    The L2 term is added to the gradient before the gradient is clipped.
    """

    title = "Adam"
    defaults = Solver.defaults | {"squared_gradient_decay_factor": 0.999}

    @_solver_arguments
    def __init__(
        self,
        learning_rate: float | None = None,
        gradient_decay_factor: float = 0.9,
        squared_gradient_decay_factor: float | None = None,
        epsilon: float = 1e-8,
        l2: float = 0.0,
        l2_factors: Factors = None,
        learning_rate_factors: Factors = None,
        **shared: "Unpack[Shared]",
    ) -> None:
        square_decay = self.value("squared_gradient_decay_factor", squared_gradient_decay_factor)
        decay, clip = _decay_and_clip(l2, l2_factors, **shared)
        chain = decay, clip, AdamMoments(gradient_decay_factor, square_decay, epsilon), Rate()
        super().__init__(learning_rate, *chain, learning_rate_factors=learning_rate_factors)


class AdamW(Solver):
    """Adam with decoupled weight decay; see `CorrectedAdamMoments`.

        w <- w - learning_rate * (m_hat / (sqrt(v_hat) + epsilon) + l2 * factor * w)

    `l2` is called `weight_decay` in PyTorch. The moments do not include the decay, and the decay is
    not clipped.

    Notes
    -----
    The method is described in Loshchilov and Hutter, "Decoupled weight decay regularization", 2019.
    As in torch.optim.AdamW, the current learning rate also multiplies the decay. In algorithm 2 of
    the paper, only the schedule multiplies the decay, so the paper's lambda is l2 times the initial
    learning rate.
    """

    title = "AdamW"
    defaults = Adam.defaults | {"l2": 0.01}
    decouples_decay = True

    @_solver_arguments
    def __init__(
        self,
        learning_rate: float | None = None,
        gradient_decay_factor: float = 0.9,
        squared_gradient_decay_factor: float | None = None,
        epsilon: float = 1e-8,
        l2: float | None = None,
        l2_factors: Factors = None,
        learning_rate_factors: Factors = None,
        **shared: "Unpack[Shared]",
    ) -> None:
        square_decay = self.value("squared_gradient_decay_factor", squared_gradient_decay_factor)
        decay, clip = _decay_and_clip(self.value("l2", l2), l2_factors, **shared)
        moments = CorrectedAdamMoments(gradient_decay_factor, square_decay, epsilon)
        chain = clip, moments, decay, *self._scalings(decay), Rate()
        super().__init__(learning_rate, *chain, learning_rate_factors=learning_rate_factors)

    def _scalings(self, decay: WeightDecay) -> tuple["Transform", ...]:
        """Return transforms that scale the update with its decay."""
        return ()


class RMSProp(Solver):
    """RMSProp in the form of MATLAB's rmspropupdate; see `RMSPropMoment`.

        w <- w - learning_rate * g / (sqrt(v) + epsilon)

    Here g is the gradient, and v is the moving mean of g^2. The L2 term is added to g before the
    gradient is clipped.
    """

    title = "RMSProp"
    defaults = Solver.defaults | {"squared_gradient_decay_factor": 0.9}

    @_solver_arguments
    def __init__(
        self,
        learning_rate: float | None = None,
        squared_gradient_decay_factor: float | None = None,
        epsilon: float = 1e-8,
        l2: float = 0.0,
        l2_factors: Factors = None,
        learning_rate_factors: Factors = None,
        **shared: "Unpack[Shared]",
    ) -> None:
        square_decay = self.value("squared_gradient_decay_factor", squared_gradient_decay_factor)
        decay, clip = _decay_and_clip(l2, l2_factors, **shared)
        chain = decay, clip, RMSPropMoment(square_decay, epsilon), Rate()
        super().__init__(learning_rate, *chain, learning_rate_factors=learning_rate_factors)


class LARS(Solver):
    """Layerwise adaptive rate scaling: SGD with momentum, scaled by the norms of the weights.

        v <- momentum * v - learning_rate * ratio * (g + l2 * w),    w <- w + v

    where ratio = trust_coefficient * |w| / (|g| + l2 * |w|) for each learnable with weight decay,
    and 1 for other learnables; see `LarsTrustRatio`. The decay is added after the gradient is
    clipped. The method is intended for mini-batches of thousands of images.

    Notes
    -----
    The method is algorithm 1 of You, Gitman and Ginsburg, "Large batch training of convolutional
    networks", 2017. In the paper, the learning rate decreases as a polynomial of power 2, which the
    options `learn_rate_schedule="polynomial"` and `learn_rate_power=2` select.
    """

    title = "LARS"
    defaults = Solver.defaults | {"learning_rate": 1.0}  # the ratio is a few thousandths

    @_solver_arguments
    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        l2: float = 1e-4,
        l2_factors: Factors = None,
        learning_rate_factors: Factors = None,
        *,
        nesterov: bool | Literal["on", "off"] = False,
        **shared: "Unpack[Shared]",
    ) -> None:
        decay, clip = _decay_and_clip(l2, l2_factors, **shared)
        ratio = LarsTrustRatio(trust_coefficient, decay.factors, decay.exclude)
        chain = clip, decay, ratio, Rate(), momentum_of(momentum, nesterov)
        super().__init__(learning_rate, *chain, learning_rate_factors=learning_rate_factors)


class LAMB(AdamW):
    """Layerwise adaptive moments: AdamW with steps scaled by the norms of the weights.

        u = m_hat / (sqrt(v_hat) + epsilon) + l2 * w
        w <- w - learning_rate * |w| / |u| * u

    The ratio |w| / |u| is replaced by 1 for learnables without weight decay; see `LambTrustRatio`.
    `CorrectedAdamMoments` defines m_hat and v_hat. The method is intended for mini-batches of
    thousands of images.

    Notes
    -----
    The method is algorithm 2 of You et al., "Large batch optimization for deep learning: training
    BERT in 76 minutes", 2020.
    """

    title = "LAMB"

    def _scalings(self, decay: WeightDecay) -> tuple["Transform", ...]:
        return (LambTrustRatio(decay.factors, decay.exclude),)


SOLVERS: dict[str, type[Solver]] = {
    cls.__name__.lower(): cls for cls in (SGDM, Adam, AdamW, RMSProp, LARS, LAMB)
}
# Defaults that depend on the solver: {option: {solver: value}}.
BY_SOLVER: dict[str, dict[str, float]] = {
    option: {name: cls.defaults[option] for name, cls in SOLVERS.items() if option in cls.defaults}
    for option in sorted({option for cls in SOLVERS.values() for option in cls.defaults})
}
# Options that depend on the solver: the learning rate, and the options that only some solvers use.
SOLVER_NAMES = (
    "learning_rate",
    *(
        name
        for name in declared(SolverOptions)
        if 0 < sum(cls.takes(name) for cls in SOLVERS.values()) < len(SOLVERS)
    ),
)


@options_class(group="Solver", resume="fixed")
class SolverChoice:
    """The option of `TrainingOptions` that selects the solver."""

    solver: SolverName = choice(
        f"Optimizer: {either([cls.title for cls in SOLVERS.values()])}",
        default="sgdm",
        matlab="solverName",
    )


def of_options(options: "TrainingOptions", **factors: Factors) -> Solver:
    """Create the optimizer that the options select; see `Solver.of_options`.

    Parameters
    ----------
    options : TrainingOptions
        The options; `solver` selects the class.
    **factors
        Per-parameter multipliers, usually `**net.factors`.

    Returns
    -------
    Solver
        The optimizer.
    """
    return SOLVERS[options.solver].of_options(options, **factors)


def help_text(declaration: Field) -> str:
    """Return the help text of an option, with the names of the solvers that it is about."""
    solvers = (name for name, cls in SOLVERS.items() if cls.takes(declaration.name))
    decoupled = (name for name, cls in SOLVERS.items() if cls.decouples_decay)
    text: str = declaration.metadata["help"]
    text = text.replace("{solvers}", ", ".join(solvers))
    return text.replace("{decoupled}", ", ".join(decoupled))


def shown_default(declaration: Field) -> str:
    """Return a default as text, such as "none" or "0.01 (sgdm), 0.001 (adam, rmsprop)"."""
    if declaration.name not in BY_SOLVER:
        return default_text(declaration)
    solvers: dict[float, list[str]] = {}
    for solver, value in BY_SOLVER[declaration.name].items():
        solvers.setdefault(value, []).append(solver)
    if len(solvers) == 1:
        return str(*solvers)
    return ", ".join(f"{value:g} ({', '.join(names)})" for value, names in solvers.items())


def _parameters(cls: type[Solver]) -> Iterator[str]:
    """Yield the section Parameters of a solver's docstring, from the declarations of options."""
    yield "\n    Parameters\n    ----------\n"
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in DECLARED:
            default = cls.defaults[name] if parameter.default is None else parameter.default
            yield parameter_text(DECLARED[name], help_text(DECLARED[name]), repr(default))
        else:
            owner = "WeightDecay" if name == "l2_factors" else "Optimizer"
            yield f"    {name} : dict, optional\n"
            yield f"        Multiplier for each learnable, {{name: factor}}; see `{owner}`.\n"


if Solver.__doc__:  # None under python -OO
    for _solver in SOLVERS.values():
        _solver.__doc__ = "".join([_solver.__doc__ or "", *_parameters(_solver)])
