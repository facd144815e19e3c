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
from mpidl.backends.cpu import builds
from mpidl.losses import cross_entropy

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", shutil.which("qemu-aarch64")

needs_cross = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no {COMPILER}: apt-get install gcc-aarch64-linux-gnu"
)


@needs_cross
@pytest.mark.slow("aarch64")
def test_no_warnings(tmp_path):
    failed = kernels.compile_builds(["generic"], tmp_path, [COMPILER], ["-Werror"])
    assert {name: error.output for name, error in failed.items()} == {}


@needs_cross
@pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64: apt-get install qemu-user")
@pytest.mark.skipif(
    not (builds.runs_here("x86-64-v3") and "x86-64-v3" in builds.built()),
    reason="no kernels with fused multiply-add to compare with",
)
@pytest.mark.slow("aarch64")
def test_the_bytes_of_avx2(tmp_path):
    before = builds.running()
    builds.use("x86-64-v3")
    try:
        with recording() as calls:
            backends.configure(threads=2)
            train_a_little()
    finally:
        builds.use(before)
    assert {"conv2d", "conv2d_backward", "pool2d", "dense", "softmax"} <= set(calls.called)
    program = tmp_path / "replay"
    (tmp_path / "replay.c").write_text(calls.text)
    words = [*kernels.FLAGS, "-I", kernels.SOURCES, "-static", tmp_path / "replay.c"]
    words += [f"{kernels.SOURCES}/{name}" for name in kernels.source_names()]
    subprocess.run([COMPILER, *words, "-lm", "-o", program], check=True)
    assert run(program, calls.data) == (0, f"{len(calls.called)} calls\n")
    calls.data[-1] = bytes([calls.data[-1][0] ^ 1]) + calls.data[-1][1:]
    code, text = run(program, calls.data)  # negative control: one bit of the last result changed
    assert code == 1 and f"{calls.called[-1]}, call {len(calls.called) - 1} differs" in text


def run(program, data):
    process = subprocess.run([EMULATOR, program], input=b"".join(data), capture_output=True)
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
