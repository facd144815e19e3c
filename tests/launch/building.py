"""Import kernels/build.py as a module for the tests of builds."""

import importlib.util
import shutil

import pytest
from launcher import ROOT

_spec = importlib.util.spec_from_file_location("build", ROOT / "kernels" / "build.py")
kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(kernels)

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler: cc, gcc or clang"
)


def cross_compiler(folder):
    """Return a program that answers as a compiler for AArch64 does, and writes empty files."""
    program = folder / "aarch64-cc"
    program.write_text(
        '#!/bin/sh\ncase "$*" in\n*-dM*) echo "#define __aarch64__ 1" ;;\n'
        '--version) echo "a compiler for AArch64" ;;\n'
        '*) for word; do :; done; : >"$word" ;;\nesac\n'
    )
    program.chmod(0o755)
    return str(program)
