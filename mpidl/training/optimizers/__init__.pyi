from mpidl.training.optimizers.adam import *
from mpidl.training.optimizers.chain import *
from mpidl.training.optimizers.layerwise import *
from mpidl.training.optimizers.rmsprop import *
from mpidl.training.optimizers.sgdm import *
from mpidl.training.optimizers.solvers import *
from mpidl.training.optimizers.solvers import SOLVERS as SOLVERS
from mpidl.training.optimizers.solvers import Solver as Solver
from mpidl.training.optimizers.solvers import SolverName as SolverName
from mpidl.training.optimizers.solvers import of_options as of_options
from mpidl.training.optimizers.transforms import *
