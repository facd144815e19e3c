"""What is installed: the whole package, and no more of other packages than it needs at once."""

import configparser
import subprocess
import sys
import zipfile

import pytest
from launcher import ROOT, environment, mpirun

# Of a tree that was installed once and changed since, these must not be taken for its sources.
LEFTOVERS = ("__pycache__", ".egg-info", ".pyc")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory):
    """The names of the files in a wheel built from a copy of the sources."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in sources("setup.cfg", "pyproject.toml", "LICENSE", "README.md", "mpidl", "kernels"):
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", out, copy]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("mpidl-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def sources(*names):
    """The files under these names of the checkout, without what running it has left there."""
    for name in names:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and not any(part.endswith(LEFTOVERS) for part in file.parts):
                yield file


def test_the_wheel_holds_every_file(wheel_names):
    files = {str(path.relative_to(ROOT)) for path in sources("mpidl", "kernels")}
    expected = {f"mpidl/{name}" if name.startswith("kernels/") else name for name in files}
    code = {name for name in wheel_names if ".dist-info/" not in name}
    assert expected - code == set(), "not in the wheel: add them to setup.cfg"
    assert code - expected == set(), "in the wheel, but not in the sources"
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names)


def test_every_package_is_listed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    on_disk = {".".join(p.parent.relative_to(ROOT).parts) for p in sources("mpidl") if p.suffix}
    assert listed == on_disk | {"mpidl.kernels"}


def test_import_is_lean():
    """Thousands of ranks import it at once, from one file system."""
    late = ["h5py", "rich", "matplotlib", "cupy", "torch", "scipy", "mpi4py.MPI"]
    text = f"import sys, mpidl; print([name for name in {late} if name in sys.modules])"
    assert mpirun(None, "-c", text, check=0).stdout.strip() == "[]"
