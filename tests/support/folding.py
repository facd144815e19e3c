"""Add up the Partials of simulated ranks."""

from mpidl.core import fold


def add_up(partials):
    """Add up the Partials of all ranks along the tree, as `World.gplus` does."""
    roots = []
    for terms in zip(*(partial.terms for partial in partials), strict=True):
        tree = terms[0].tree
        nodes = [node for nodes_of_rank in tree.nodes for node in nodes_of_rank]
        values = [value.copy() for term in terms for value in term.nodes]
        roots.append(fold.fold_nodes(tree, nodes, values, terms[0].combine))
    return partials[0].finish(roots)
