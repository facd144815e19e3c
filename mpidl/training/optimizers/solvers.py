"""The base of the solvers: optimizers that the option `solver` names, in MATLAB's forms."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from mpidl.training.optimizers.chain import Optimizer
from mpidl.training.optimizers.transforms import check

if TYPE_CHECKING:
    from mpidl.training.options.training_options import TrainingOptions

Factors = Mapping[str, float] | None


class Solver(Optimizer):
    """An optimizer of the options.

    The arguments of a solver's constructor have the names of the options that it takes, beside
    `l2_factors` and `learning_rate_factors`.

    Attributes
    ----------
    solver : str
        Its name in the options.
    title : str
        Its name in texts.
    defaults : dict
        {option: value} of the options whose default the solver chooses.
    decouples_decay : bool
        Whether `l2` joins the direction of the step instead of the gradient.
    """

    solver: ClassVar[str]
    title: ClassVar[str]
    defaults: ClassVar[dict[str, float]] = {"learning_rate": 0.001, "l2": 1e-4}
    decouples_decay: ClassVar[bool] = False

    @classmethod
    def takes(cls, option: str) -> bool:
        """Return whether the solver takes an option."""
        return option in inspect.signature(cls).parameters

    @classmethod
    def of_options(cls, options: TrainingOptions, **factors: Factors) -> Solver:
        """Return the solver with the options that it takes and the factors of a network."""
        names = [name for name in inspect.signature(cls).parameters if hasattr(options, name)]
        arguments: dict[str, Any] = {name: getattr(options, name) for name in names}
        return cls(**arguments | factors)

    @classmethod
    def value(cls, name: str, value: float | None) -> float:
        """Return an argument's value, or the solver's default for None."""
        return cls.defaults[name] if value is None else check(name, value)
