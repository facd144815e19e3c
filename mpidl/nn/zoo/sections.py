"""The sections that the docstrings of all named networks share."""

from mpidl.docstrings import with_sections

builds_network = with_sections("""
    Parameters
    ----------
    input_shape : tuple of int
        Shape (C, H, W) of an image.
    classes : int
        Number of outputs.
    seed : int
        Seed of the initial weights.

    Returns
    -------
    Network
        The network, with initial weights.
    """)
