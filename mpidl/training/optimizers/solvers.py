"""Define the base class of solvers, which are the optimizers that the option `solver` selects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mpidl.training.optimizers.chain import Optimizer
from mpidl.training.optimizers.transforms import Transform, check

if TYPE_CHECKING:
    from mpidl.training.options.training_options import TrainingOptions

Factors = Mapping[str, float] | None


class Solver(Optimizer):
    """Base class of optimizers that the option `solver` selects.

    Each parameter of a solver's constructor has the name of an option that the solver uses, except
    for `l2_factors` and `learning_rate_factors`.

    Attributes
    ----------
    solver : str
        Value of the option `solver` that selects this class.
    title : str
        Name of the solver in help texts.
    defaults : dict
        {option: value} for options whose default depends on the solver.
    decouples_decay : bool
        Whether weight decay (`l2`) is decoupled: applied to the update, as in AdamW, rather than
        added to the gradient.
    """

    solver: ClassVar[str]
    title: ClassVar[str]
    defaults: ClassVar[dict[str, float]] = {"learning_rate": 0.001, "l2": 1e-4}
    decouples_decay: ClassVar[bool] = False

    def __init__(
        self,
        learning_rate: float | None,
        *transforms: Transform,
        learning_rate_factors: Factors = None,
    ) -> None:
        rate = self.value("learning_rate", learning_rate)
        super().__init__(rate, *transforms, learning_rate_factors=learning_rate_factors)

    @classmethod
    @functools.cache
    def parameter_names(cls) -> tuple[str, ...]:
        """Return the names of the constructor's parameters."""
        return tuple(inspect.signature(cls).parameters)

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
        return option in cls.parameter_names()

    @classmethod
    def of_options(cls, options: TrainingOptions, **factors: Factors) -> Solver:
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
        names = [name for name in cls.parameter_names() if hasattr(options, name)]
        arguments: dict[str, Any] = {name: getattr(options, name) for name in names}
        return cls(**arguments | factors)

    @classmethod
    def value(cls, name: str, value: float | None) -> float:
        """Check an argument of the constructor, and return it or the solver's default.

        Parameters
        ----------
        name : str
            Name of the argument.
        value : float or None
            Value of the argument; None for the solver's default.

        Returns
        -------
        float
            The value that the solver uses.
        """
        return cls.defaults[name] if value is None else check(name, value)
