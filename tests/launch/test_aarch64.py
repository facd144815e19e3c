"""Test that kernels for AArch64, run with qemu, give the same bytes as the AVX2 kernels."""

import shutil
import subprocess

import networks
import numpy as np
import pytest
from building import kernels
from replay import recording

import mpidl as dl
from mpidl import backends
from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.losses import cross_entropy

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", shutil.which("qemu-aarch64")
LIBRARIES = "/usr/aarch64-linux-gnu"  # the C library that the cross compiler links

needs_cross = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no {COMPILER}: apt-get install gcc-aarch64-linux-gnu"
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a folder with the library for AArch64, and {build: error}."""
    folder = tmp_path_factory.mktemp("aarch64")
    return folder, kernels.compile_builds(["generic"], folder, [COMPILER], ["-Werror"])


@needs_cross
@pytest.mark.slow("aarch64")
def test_no_warnings(compiled):
    assert {name: error.output for name, error in compiled[1].items()} == {}


@needs_cross
@pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64: apt-get install qemu-user")
@pytest.mark.skipif(
    not (builds.runs_here("x86-64-v3") and "x86-64-v3" in builds.built()),
    reason="no kernels with fused multiply-add to compare with",
)
@pytest.mark.slow("aarch64")
@pytest.mark.parametrize("precision, suffix", [("fp32", ""), ("bf16", "_bf16")])
def test_the_bytes_of_avx2(precision, suffix, compiled, tmp_path, monkeypatch):
    before = builds.running()
    monkeypatch.setattr(settings, "precision", precision)
    builds.use("x86-64-v3")
    try:
        with recording() as calls:
            backends.configure(threads=2)
            train_a_little()
    finally:
        builds.use(before)
    stored = {f"{name}{suffix}" for name in ("conv2d", "conv2d_backward", "pool2d", "dense")}
    assert {*stored, "softmax"} <= set(calls.called)
    program, folder = tmp_path / "replay", compiled[0]
    (tmp_path / "replay.c").write_text(calls.text)
    words = ["-I", kernels.SOURCES, tmp_path / "replay.c", folder / "libmpidl-generic.so"]
    subprocess.run([COMPILER, *words, "-lm", f"-Wl,-rpath,{folder}", "-o", program], check=True)
    assert run(program, calls.data) == (0, f"{len(calls.called)} calls\n")
    calls.data[-1] = bytes([calls.data[-1][0] ^ 1]) + calls.data[-1][1:]
    code, text = run(program, calls.data)  # negative control: one bit of the last result changed
    assert code == 1 and f"{calls.called[-1]}, call {len(calls.called) - 1} differs" in text


def run(program, data):
    command = [EMULATOR, "-L", LIBRARIES, program]
    process = subprocess.run(command, input=b"".join(data), capture_output=True)
    return process.returncode, process.stdout.decode()


def train_a_little():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (37, 3, 14, 13), np.uint8)
    images = dl.ArrayDatastore(pixels, rng.integers(0, 10, 37))
    net = dl.Network(networks.varied(images.image_shape, 10), images.image_shape, seed=0)
    step = dl.value_and_grad(cross_entropy)
    for batch in dl.MinibatchQueue(images, 37, 0, dl.OneRank(), prefetch=0).epoch(1):
        step(net, *batch)
    net.predict(pixels[:5])
