"""Check that an argument is a network."""

from __future__ import annotations

from mpidl.errors import UserError
from mpidl.nn import Network


def need_network(net: object) -> None:
    """Raise UserError unless the object is a Network."""
    if not isinstance(net, Network):
        layers = isinstance(net, list | tuple)
        hint = ": use dl.Network(layers, input_shape)" if layers else ""
        raise UserError(f"expected a network, found {type(net).__name__}{hint}")
