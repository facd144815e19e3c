"""Optimizers, which are chains of gradient transforms that can also be used individually.

`SOLVERS` lists the optimizers that the option `solver` can select. The choices and the help text of
`--solver`, the solver-dependent defaults and the options page of the documentation are derived from
this list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidl.training.optimizers.adam import Adam, AdamMoments, AdamW, CorrectedAdamMoments
from mpidl.training.optimizers.chain import FusedTail, Optimizer, fuses
from mpidl.training.optimizers.layerwise import LAMB, LARS, LambTrustRatio, LarsTrustRatio
from mpidl.training.optimizers.options import SolverName as SolverName
from mpidl.training.optimizers.rmsprop import RMSProp, RMSPropMoment
from mpidl.training.optimizers.sgdm import SGDM, Momentum, NesterovMomentum
from mpidl.training.optimizers.solvers import Factors, Solver
from mpidl.training.optimizers.transforms import Clip, Rate, Transform, WeightDecay

if TYPE_CHECKING:
    from mpidl.training.options.training_options import TrainingOptions

SOLVERS: dict[str, type[Solver]] = {
    solver.solver: solver for solver in (SGDM, Adam, AdamW, RMSProp, LARS, LAMB)
}


def of_options(options: TrainingOptions, **factors: Factors) -> Solver:
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


__all__ = [
    "Adam",
    "AdamMoments",
    "AdamW",
    "Clip",
    "CorrectedAdamMoments",
    "FusedTail",
    "LAMB",
    "LARS",
    "LambTrustRatio",
    "LarsTrustRatio",
    "Momentum",
    "NesterovMomentum",
    "Optimizer",
    "RMSProp",
    "RMSPropMoment",
    "Rate",
    "SGDM",
    "SOLVERS",
    "Solver",
    "SolverName",
    "Transform",
    "WeightDecay",
    "fuses",
    "of_options",
]
