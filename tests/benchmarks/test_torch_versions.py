"""Test comparisons with several versions of PyTorch, and the check for oneDNN's slow code."""

import os
import re
import subprocess
import sys

import pytest

from benchmarks import arguments, compare, onednn, torch_step, torch_versions, turns
from mpidl.errors import Fault, UserError

# Output lines of oneDNN 3 (in PyTorch 2.13), of oneDNN before 2.7, and of oneDNN before 1.0.
FAST = """onednn_verbose,v1,info,oneDNN v3.11.3 (commit 0)
onednn_verbose,v1,primitive,exec,cpu,reorder,simple:any,undef,src:f32::blocked:ab,,,1x2,0.01
onednn_verbose,v1,primitive,exec,cpu,convolution,brgconv:avx512_core,forward_training,src,,,mb1,0.1
onednn_verbose,v1,primitive,create,cpu,convolution,ref:any,forward_training,src,,,mb1,0.1
onednn_verbose,exec,cpu,convolution,jit:avx2,backward_data,src,,,mb1,0.1
dnnl_verbose,exec,cpu,matmul,gemm:jit,undef,src,,,1x2,0.1
a line of another library,exec,cpu,convolution,ref:any
"""
SLOW = "onednn_verbose,v1,primitive,exec,cpu,convolution,ref:any,backward_weights,src,,,mb1,9.9\n"


def test_implementations_of_convolutions_and_products():
    counts = onednn.implementations(FAST + FAST)
    assert counts == {
        "convolution brgconv:avx512_core": 2,
        "convolution jit:avx2": 2,
        "matmul gemm:jit": 2,
    }
    onednn.refuse_reference("eager", counts)
    onednn.refuse_reference("eager", onednn.implementations(""))


@pytest.mark.parametrize(
    "implementation", ["ref:any", "ref", "ref_int8:any", "x64:gemm:ref", "jit:avx2+ref:any"]
)
def test_reference_code_ends_a_comparison(implementation):
    counts = onednn.implementations(FAST + SLOW.replace("ref:any", implementation))
    with pytest.raises(
        Fault, match=rf"^eager: oneDNN fell back .*\(convolution {re.escape(implementation)}\)"
    ):
        onednn.refuse_reference("eager", counts)


class Answers:
    """A side of the comparison that gives fixed answers."""

    def __init__(self, name, counts):
        self.name, self.counts = name, counts

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, action, *arguments):
        versions = {} if self.name == "ours" else {"torch": self.name.split()[1]}
        description = {"versions": versions, "arithmetic": "AVX"}
        answers = {
            "describe": description,
            "losses": [1.0, 0.9, 0.8],
            "implementations": self.counts,
            "steps": [0.5],
        }
        return [answers[action]]

    def mean_step(self, count):
        return 0.3 if self.name == "eager 2.12.1" else 0.5 if self.name != "ours" else 0.1


def compared(monkeypatch, tmp_path, counts, precision="fp32"):
    """Compare two versions' fixed answers. The second version's implementations are `counts`."""
    monkeypatch.setattr(compare, "our_side", lambda *_: Answers("ours", {}))
    fast = onednn.implementations(FAST)
    sides = {
        f"eager {version}": compare.OtherSide(
            version, lambda folder, v=version, c=c: Answers(f"eager {v}", c)
        )
        for version, c in (("2.13.0", fast), ("2.12.1", counts))
    }
    options = arguments.parse(["compare", "--rounds", "2", "--precision", precision])
    options.busy = 0.0
    return compare.compare_time(options, sides, str(tmp_path))


def test_two_versions_are_compared(monkeypatch, tmp_path, capsys):
    record = compared(monkeypatch, tmp_path, onednn.implementations(FAST))
    assert record["versions"]["torch"] == "2.13.0, 2.12.1"
    assert record["ratio_by_version"] == {
        "2.13.0": pytest.approx(5.0),
        "2.12.1": pytest.approx(3.0),
    }
    assert record["ratio"] == pytest.approx(3.0) and record["best_variant"] == "eager 2.12.1"
    assert record["onednn"]["eager 2.12.1"]["convolution jit:avx2"] == 1
    assert "PyTorch 2.13.0: ratio 5.00 (eager 2.13.0)" in capsys.readouterr().out


def test_one_side_with_reference_code_ends_the_comparison(monkeypatch, tmp_path):
    with pytest.raises(Fault, match="eager 2.12.1: oneDNN fell back to its reference code"):
        compared(monkeypatch, tmp_path, onednn.implementations(FAST + SLOW))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_side_without_onednn_in_bfloat16_is_left_out(monkeypatch, tmp_path, precision):
    """In float32, PyTorch's own code and MKL are fast."""
    record = compared(monkeypatch, tmp_path, {}, precision)
    if precision == "fp32":
        assert not record["failed"] and record["best_variant"] == "eager 2.12.1"
    else:
        reason = "oneDNN has no bfloat16 for these CPU instructions"
        assert record["failed"] == {"eager 2.12.1": reason}
        assert record["best_variant"] == "eager 2.13.0"


@pytest.fixture
def other_python(tmp_path):
    """Return the path of a Python that imports another "torch"."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '2.12.1+cpu'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_versions_and_their_pythons(monkeypatch, tmp_path, other_python):
    monkeypatch.setattr(torch_step, "is_installed", lambda: True)
    monkeypatch.setattr(torch_versions.configuration, "version_of", lambda name: "2.13.0+cpu")
    words = arguments.parse(["compare", "--torch", f"2.13.0,{other_python}"]).torch
    expected = [("2.13.0", sys.executable), ("2.12.1", other_python)]
    assert torch_versions.find(words) == expected
    assert torch_versions.find([]) == [("2.13.0+cpu", sys.executable)]
    with pytest.raises(UserError, match="expected different versions, found 2.12.1 twice"):
        torch_versions.find([other_python, other_python])
    # a complete environment is reused
    place = tmp_path / "torch-2.12.1"
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").symlink_to(other_python)
    (place / "complete").touch()
    assert torch_versions.find(["2.12.1"], tmp_path) == [("2.12.1", f"{place}/bin/python")]
    monkeypatch.setattr(torch_step, "is_installed", lambda: False)
    assert torch_versions.find([]) == []


def test_each_version_has_its_sides(monkeypatch):
    pythons = [torch_versions.TorchPython(v, f"/{v}/python") for v in ("2.13.0", "2.12.1")]
    started = []
    monkeypatch.setattr(torch_versions, "find", lambda words: pythons[: len(words)])
    monkeypatch.setattr(turns, "Side", lambda *arguments: started.append(arguments))
    line = "compare --variants eager,compile --with jax --torch "
    options = arguments.parse((line + "2.13.0,2.12.1").split())
    sides = compare.other_sides(options)
    names = ["eager 2.13.0", "compile 2.13.0", "eager 2.12.1", "compile 2.12.1", "jax"]
    assert list(sides) == names and sides["jax"].version == ""
    sides["compile 2.12.1"].start("/folder")
    ((name, (command,), ranks, variables, folder, _),) = started
    assert (name, ranks, folder) == ("compile 2.12.1", 1, "/folder")
    assert command[:3] == ["/2.12.1/python", "-m", "benchmarks.theirs"]
    assert '"variant": "compile"' in command[3]
    root = os.path.dirname(os.path.dirname(os.path.abspath(compare.__file__)))
    assert variables["PYTHONPATH"].split(os.pathsep)[0] == root
    names = list(compare.other_sides(arguments.parse((line + "2.13.0").split())))
    assert names == ["eager", "compile", "jax"]


def test_versions_that_cannot_be_had(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no torch' >&2; exit 1\n")
    python.chmod(0o755)
    for words, message in (
        ([str(python)], "this Python cannot import PyTorch: ModuleNotFoundError: no torch"),
        ([str(tmp_path / "missing")], "expected a Python program: No such file"),
    ):
        with pytest.raises(UserError, match=message):
            torch_versions.find(words)
    with pytest.raises(UserError, match="--torch must be versions such as 2.13.0"):
        arguments.parse(["compare", "--torch", "newest"])


def test_a_version_that_pip_cannot_install(monkeypatch, tmp_path):
    def run(command, **_):
        failed = "pip" in command
        return subprocess.CompletedProcess(command, int(failed), "", "ERROR: No matching version\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch_step, "is_installed", lambda: False)
    with pytest.raises(UserError, match="--torch 9.9.9: cannot install it: ERROR: No matching"):
        torch_versions.find(["9.9.9"], tmp_path)
    assert not (tmp_path / "torch-9.9.9" / "complete").exists()


CONVOLUTION = """
import torch
from benchmarks import onednn
layer, images = torch.nn.Conv2d(20, 20, 3, padding=1), torch.zeros(2, 20, 24, 24)
print("output:", onednn.verbose_output(lambda: layer(images)))
layer(images)
"""


@pytest.mark.slow("jobs")
@pytest.mark.timeout(120)
def test_what_onednn_prints_in_pytorch():
    """Only the call inside verbose_output prints. Negative control: a reference implementation."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    command = [sys.executable, "-c", CONVOLUTION]
    environment = turns.environment_of_checkout()
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    text = output.stdout.partition("output:")[2]
    counts = onednn.implementations(text)
    assert [name.split()[0] for name in counts] == ["convolution"] and sum(counts.values()) == 1
    onednn.refuse_reference("eager", counts)
    (implementation,) = (name.split()[1] for name in counts)
    with pytest.raises(Fault, match="fell back"):
        onednn.refuse_reference(
            "eager", onednn.implementations(text.replace(implementation, "ref:any"))
        )
