"""Find which oneDNN implementations compute PyTorch's convolutions and matrix products.

oneDNN has fast implementations for the processors and types that it knows, and plain reference code
for all other processors and types. The reference code is many times slower, so a comparison with it
says nothing about PyTorch.
"""

import collections
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping

from mpidl.errors import Fault

KINDS = ("convolution", "deconvolution", "inner_product", "matmul")


def implementations(output: str) -> dict[str, int]:
    """Count the executions of convolutions and products in oneDNN's verbose output.

    Parameters
    ----------
    output : str
        Output with lines of oneDNN. Such a line is "onednn_verbose,...,exec,cpu,convolution,
        brgconv:avx512_core,forward_training,...". The fields before "exec" depend on the version.

    Returns
    -------
    dict of str to int
        Number of executions of each primitive and implementation, such as "convolution ref:any".
    """
    counts: collections.Counter[str] = collections.Counter()
    for line in output.splitlines():
        words = line.strip().split(",")
        if words[0] not in ("onednn_verbose", "dnnl_verbose") or "exec" not in words:
            continue
        _, kind, implementation, *_ = [*words[words.index("exec") + 1 :], "", "", ""]
        if kind in KINDS:
            counts[f"{kind} {implementation}"] += 1
    return dict(counts)


def refuse_reference(side: str, counts: Mapping[str, int]) -> None:
    """Raise Fault if `counts`, a result of `implementations`, contains reference code.

    `side` is the name of the side that executed the primitives.
    """
    names = [
        name
        for name in counts  # such as "convolution x64:gemm:jit"
        if any(part.startswith("ref") for part in re.split("[ :+]", name)[1:])
    ]
    if names:
        raise Fault(
            f"{side}: oneDNN fell back to its reference code ({', '.join(sorted(names))}), so a "
            "ratio to this PyTorch would be meaningless; expected code for this processor's "
            "instructions"
        )


def verbose_output(function: Callable[[], object]) -> str:
    """Call a function that uses PyTorch, and return the output of oneDNN."""
    import torch

    library = ctypes.CDLL(None)  # oneDNN prints through the C library
    sys.stdout.flush()
    library.fflush(None)
    stdout = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                function()
        finally:
            library.fflush(None)
            os.dup2(stdout, 1)
            os.close(stdout)
        file.seek(0)
        return file.read()
