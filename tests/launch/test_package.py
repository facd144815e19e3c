"""Test that a wheel contains the whole package, and that importing mpidl loads few modules."""

import configparser
import os
import shutil
import subprocess
import venv
import zipfile

import jobs
import pytest
from building import cross_compiler, kernels, needs_compiler
from launcher import ROOT, mpirun

# Name endings of files and folders that an earlier installation or run has created.
LEFTOVERS = ("__pycache__", ".egg-info", ".pyc")
SHORT = ["--max-iterations", 2, "--batch-size", 50, "--threads", 1]


def sources(*names):
    """Yield the source files among the given files and folders of the checkout."""
    for name in names:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            is_leftover = any(part.endswith(LEFTOVERS) for part in file.parts)
            if file.is_file() and not is_leftover and kernels.LIB not in map(str, file.parents):
                yield file


def distribute(kind, folder, out, env=None):
    """Build an "sdist" or a "wheel" of a folder of sources. Return its path and the output.

    This function does in one process what `pip wheel` does in several processes.
    """
    text = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    result = mpirun(None, "-c", text, env=env, cwd=folder, check=0)
    (path,) = out.glob("mpidl-*")
    return path, result.stdout + result.stderr


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Return the folder of an unpacked source distribution of the checkout."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("sdist")
    files = ["setup.cfg", "pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"]
    for path in sources(*files, "mpidl", "mpidl_command.py", "kernels"):
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    packed, _ = distribute("sdist", copy, out)
    shutil.unpack_archive(packed, out)
    unpacked = packed.with_name(packed.name.removesuffix(".tar.gz"))
    # Reuse compiled objects if they exist. Their names contain a hash of the sources.
    if os.path.isdir(kernels.OBJECTS):
        shutil.copytree(kernels.OBJECTS, unpacked / "build" / "kernels")
    return unpacked


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory):
    return distribute("wheel", unpacked, tmp_path_factory.mktemp("wheel"))[0]


@pytest.fixture(scope="module")
def wheel_without_compiler(unpacked, tmp_path_factory):
    """Return a wheel built without a compiler, in a folder where an earlier build left kernels."""
    env = {"PATH": tmp_path_factory.mktemp("empty"), "CC": ""}
    wheel, text = distribute("wheel", unpacked, tmp_path_factory.mktemp("pure"), env)
    assert "mpidl: kernels that are not compiled: no C compiler: cc, gcc or clang is" in text
    return wheel


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def expected_names():
    """Return the paths of the package's files in a wheel without kernels."""
    files = {str(path.relative_to(ROOT)) for path in sources("mpidl", "mpidl_command.py")}
    cuda = {f"mpidl/{path.relative_to(ROOT)}" for path in sources("kernels/cuda")}
    other = ("README.md", "formulas.h", "cpu/mpidl.h")
    return files | cuda | {f"mpidl/kernels/{name}" for name in other}


@needs_compiler
@pytest.mark.slow("package")
def test_the_wheel_holds_every_file(wheel):
    expected = expected_names()
    expected |= {f"mpidl/kernels/lib/libmpidl-{build}.so" for build in kernels.builds()}
    assert expected - names_in(wheel) == set(), "not in the wheel: add them to setup.cfg"
    assert names_in(wheel) - expected == set(), "in the wheel, but not in the sources"
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
        (path,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        assert "mpidl = mpidl_command:main" in archive.read(path).decode()
    python, abi, platform = wheel.stem.split("-")[2:]
    assert (python, abi) == ("py3", "none") and platform.startswith("linux_")


@pytest.mark.slow("package")
def test_without_a_compiler_there_are_no_kernels_in_it(wheel, wheel_without_compiler):
    # The fixture `wheel` comes first, because this build must not use the kernels of that wheel.
    assert names_in(wheel_without_compiler) == expected_names()
    assert wheel_without_compiler.name.endswith("-py3-none-any.whl")


@pytest.mark.slow("package")
def test_a_wheel_is_for_the_machine_of_its_compiler(unpacked, tmp_path):
    env = {"CC": cross_compiler(tmp_path), "LDSHARED": ""}
    (tmp_path / "dist").mkdir()
    wheel, text = distribute("wheel", unpacked, tmp_path / "dist", env)
    assert names_in(wheel) == expected_names() | {"mpidl/kernels/lib/libmpidl-generic.so"}, text
    assert wheel.name.endswith("-py3-none-linux_aarch64.whl")


@pytest.mark.slow("package")
def test_a_compiler_that_fails(unpacked, tmp_path):
    wheel, text = distribute("wheel", unpacked, tmp_path, {"CC": "/bin/false"})
    assert names_in(wheel) == expected_names()
    assert "mpidl: kernels that are not compiled: /bin/false ended with exit code 1" in text


def train(wheel, data, folder):
    """Train on 2 ranks from an unpacked wheel; return stdout and the hash of the weights."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    env = jobs.without_plots() | {"PYTHONPATH": folder / "site", "MPIDL_CPU": ""}
    words = jobs.command("train", *SHORT, data=data, out=folder / "run")
    result = mpirun(2, *words, env=env, cwd=folder, check=0)
    assert jobs.error_lines(result) == []
    return result.stdout, jobs.weights_hash(folder / "run")


@needs_compiler
@pytest.mark.slow("package")
def test_the_wheel_trains_as_the_checkout_does(wheel, pictures, tmp_path):
    stdout, weights = train(wheel, pictures, tmp_path)
    assert "without C kernels" not in stdout
    env = {"MPIDL_CPU": ""}
    assert jobs.trained_hash(1, pictures, tmp_path / "checkout", *SHORT, env=env) == weights


@pytest.mark.slow("package")
def test_without_kernels_numpy_trains_and_says_so_once(wheel_without_compiler, pictures, tmp_path):
    stdout, weights = train(wheel_without_compiler, pictures, tmp_path)
    notes = [line for line in stdout.splitlines() if "without C kernels" in line]
    assert notes == [
        "note: without C kernels, NumPy does the arithmetic, several times slower: none are "
        "compiled: reinstall mpidl on a machine with a C compiler"
    ]
    env = {"MPIDL_CPU": "numpy"}
    assert jobs.trained_hash(1, pictures, tmp_path / "checkout", *SHORT, env=env) == weights


def test_every_package_is_listed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    on_disk = {".".join(p.parent.relative_to(ROOT).parts) for p in sources("mpidl") if p.suffix}
    assert listed == on_disk | {"mpidl.kernels"}


def test_import_is_lean():
    """Importing mpidl loads few modules, because thousands of ranks may import it at once."""
    late = ["h5py", "rich", "matplotlib", "cupy", "torch", "scipy", "mpi4py.MPI"]
    text = f"import sys, mpidl; print([name for name in {late} if name in sys.modules])"
    assert mpirun(None, "-c", text, check=0).stdout.strip() == "[]"


def test_a_folder_named_mpidl_does_not_hide_the_checkout(tmp_path):
    """If a checkout's folder is named mpidl, a program next to it imports the checkout's package.

    Without run/common.sh, Python would import the folder itself as a namespace package.
    """
    venv.create(tmp_path / "venv", symlinks=True)
    (tmp_path / "mpidl").mkdir()

    def origin():
        code = "import importlib.util as u; print(u.find_spec('mpidl').origin)"
        command = [tmp_path / "venv" / "bin" / "python", "-c", code]
        environment = {"PATH": os.environ["PATH"]}
        return subprocess.check_output(command, cwd=tmp_path, env=environment, text=True).strip()

    assert origin() == "None"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    finder = packages / "__editable__.mpidl-0.1.0.pth"  # of pip, which imports more modules
    finder.write_text("import finder_of_mpidl\n")
    script = f". {ROOT}/run/common.sh; root={ROOT}; venv={tmp_path}/venv; find_checkout_first"
    subprocess.run(["bash", "-euc", script], check=True)
    assert origin() == str(ROOT / "mpidl" / "__init__.py") and not finder.exists()
