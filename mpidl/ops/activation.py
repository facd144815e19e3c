"""Activations."""

from mpidl import backends
from mpidl.ops import check
from mpidl.tape import op, refuse_gpu


@op(blocks=True)
def relu(x):
    """max(x, 0), elementwise; the gradient at 0 is 0."""
    check.images("relu", x)
    backend = backends.of(x)
    y = backend.relu(x.lanes)
    return x.like(y), lambda dy, needs: (x.like(backend.relu_dx(dy.lanes, y)),)


@op(blocks=True)
def softmax(x):
    """exp(x) / sum of exp(x) over the classes. x: (N, K); returns (N, K) in x's type."""
    check.images("softmax", x, 2)
    p = backends.of(x).softmax(x.lanes)

    def vjp(dy, needs):
        refuse_gpu("softmax's gradient", x)
        inner = (p * dy.lanes).sum(axis=1, keepdims=True)
        return (x.like((p * (dy.lanes - inner)).astype(x.dtype)),)

    return x.like(p.astype(x.dtype)), vjp
