"""Create the Backend REFERENCE from the NumPy functions of this package."""

from mpidl.backends.gather import families, gather
from mpidl.backends.reference.bf16 import for_bf16

REFERENCE = gather("reference", families(__package__), adapt=for_bf16)
