"""Differentiable ops. Each file defines the forward functions and vjps of one family of ops.

A vjp (vector-Jacobian product) computes the gradients of an op. To export a new op, add its name to
`__all__` in the file of its family; no other list needs to change.
"""

import sys

from mpidl.lazy import LazyPackage

sys.modules[__name__].__class__ = LazyPackage
