"""Let mpi4py in this environment load the machine's MPI, and print the ABI of this MPI.

    .venv/bin/python run/link_mpi.py

mpi4py loads libmpi.so.12 (the ABI "mpich", also of Intel MPI and Cray MPICH) or libmpi.so.40 (the
ABI "openmpi"). The library must belong to the `mpirun` on PATH. If mpi4py finds no library, or the
library of another MPI, this program looks for the library of that mpirun. It then compiles an empty
library with the expected name that loads the real library by its path. The empty library is in the
folder `lib` of the environment, where mpi4py looks first. A symbolic link would not work, because
the loader uses the name inside the file, which for Debian's MPICH is libmpich.so.12.

Set MPI4PY_LIBMPI to the path of the library if this program cannot find it.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

NAMES = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}  # libraries that mpi4py loads
MPIRUNS = {"mpich": r"HYDRA|Intel\(R\) MPI|MVAPICH", "openmpi": r"Open ?MPI|OpenRTE|PRRTE|prte"}
PATTERNS = ("libmpi.so*", "libmpich.so*", "libmpi_*.so.12")
LIB = Path(sys.prefix) / "lib"
# Code that prints the ABI of a library, or fails if the library is not an MPI.
PROBE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.MPI_Get_version
print("openmpi" if hasattr(library, "ompi_mpi_comm_self") else "mpich")
"""
# Code that prints the ABI of the library that mpi4py loads.
LOAD = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print("openmpi" if MPI.get_vendor()[0] == "Open MPI" else "mpich")
"""


def main() -> str:
    """Link the library unless mpi4py already finds the right one. Return the ABI of the library.

    Raises
    ------
    SystemExit
        If no suitable library exists. The exception has a one-line reason.
    """
    if sys.prefix == sys.base_prefix:
        sys.exit(f"expected the Python of a virtual environment, found {sys.executable}")
    for name in NAMES.values():
        (LIB / name).unlink(missing_ok=True)
    wanted = abi_of_mpirun()
    named = os.environ.pop("MPI4PY_LIBMPI", "")
    abi, problem = probe(LOAD)
    if abi and not named and wanted in (None, abi):
        return abi
    libraries = [named] if named else list_libraries()
    kinds = {library: probe(PROBE, library)[0] for library in libraries}
    usable = [path for path, kind in kinds.items() if kind and wanted in (None, kind)]
    if not usable:
        kind = f" with the ABI {wanted} of mpirun" if wanted else ""
        sys.exit(
            f"expected an MPI library{kind}, found "
            f"{' '.join(filter(kinds.get, kinds)) or named or 'none'}: load the cluster's MPI "
            "(module load ...), or name its library in MPI4PY_LIBMPI"
        )
    library = usable[0]
    compile_link(os.path.abspath(library), LIB / NAMES[kinds[library]])
    abi, problem = probe(LOAD)
    if abi != kinds[library]:
        sys.exit(f"{library}: mpi4py cannot load this library: {problem}")
    if named:
        print("MPI4PY_LIBMPI: unset it, because the environment has a link now", file=sys.stderr)
    return abi


def abi_of_mpirun() -> str | None:
    """Return the ABI of the MPI to which `mpirun` belongs, or None if it is unknown."""
    if not shutil.which("mpirun"):
        return None
    words = ["mpirun", "--version"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    text = result.stdout + result.stderr
    return next((abi for abi, pattern in MPIRUNS.items() if re.search(pattern, text)), None)


def list_libraries() -> list[str]:
    """Return files that may be MPI libraries. Files that belong to mpirun come first."""
    paths = [path for folder in library_folders() for path in list_folder(folder)]
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]


def library_folders() -> Iterator[str]:
    """Yield folders with libraries. Folders that belong to mpirun come first."""
    if mpirun := shutil.which("mpirun"):
        for path in (mpirun, os.path.realpath(mpirun)):
            prefix = os.path.dirname(os.path.dirname(path))
            yield from (os.path.join(prefix, name) for name in ("lib", "lib64", "lib/release"))
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    ldconfig = shutil.which("ldconfig", path=f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin")
    if ldconfig:
        listing = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False)
        for path in re.findall(r"^\s+libmpi\S* .*=> (\S+)$", listing.stdout, re.MULTILINE):
            yield os.path.dirname(path)


def list_folder(folder: str) -> list[str]:
    """Return the files of a folder that are named like MPI libraries."""
    return [path for pattern in PATTERNS for path in sorted(glob.glob(f"{folder}/{pattern}"))]


def probe(text: str, *words: str) -> tuple[str, str]:
    """Run Python code. Return the last line of its stdout and the last line of its stderr."""
    command = [sys.executable, "-c", text, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    output = result.stdout.split("\n")[-2:-1] if result.returncode == 0 else []
    return "".join(output), (result.stderr.splitlines() or ["no message"])[-1]


def compile_link(library: str, link: Path) -> None:
    """Write a library with the name of `link` that loads `library`.

    Raises
    ------
    SystemExit
        If no C compiler works.
    """
    compiler = os.environ.get("CC", "").split() or [shutil.which("cc") or "gcc"]
    words = [*compiler, "-shared", "-nostdlib", "-x", "c", os.devnull, "-x", "none"]
    with tempfile.TemporaryDirectory() as folder:
        stand_in = f"{folder}/library.so"  # the linker records its soname in the link
        try:
            for more in (
                ["-o", stand_in, f"-Wl,-soname,{library}"],
                ["-o", str(link), f"-Wl,-soname,{link.name}", "-Wl,--no-as-needed", stand_in],
            ):
                subprocess.run([*words, *more], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).splitlines()[0]
            sys.exit(f"{library}: expected a C compiler, to link it as {link.name}: {reason}")


if __name__ == "__main__":
    print(main())
