"""Test that the programs in docs/comparison.md run, and resume.

The program for MATLAB is not run. Lightning is not among the packages of the tests.
"""

import ast
import importlib.util
import re

import documented_commands
import launcher
import pool
import pytest
from image_sets import grow

PAGE = launcher.ROOT / "docs" / "comparison.md"
# torchvision's wheels need a GPU build of PyTorch. The program needs only these names of it.
TORCHVISION = """
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
from PIL import Image

class ImageFolder:
    def __init__(self, folder, transform):
        self.transform = transform
        self.files = sorted(Path(folder).glob("*/*.png"))
        self.classes = sorted({path.parent.name for path in self.files})

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        path = self.files[i]
        return self.transform(Image.open(path)), self.classes.index(path.parent.name)

def to_tensor():
    return lambda image: torch.tensor(np.array(image)).permute(2, 0, 1) / 255

datasets = SimpleNamespace(ImageFolder=ImageFolder)
transforms = SimpleNamespace(ToTensor=to_tensor)
"""


def programs():
    """Return {name: source} of the Python programs: "mpidl", and the file names in the comments."""
    sources = {}
    for _, language, source in documented_commands.fences(PAGE.read_text()):
        if language == "python":
            sources["mpidl"] = source
        elif language == "py":
            sources[re.match("# .*: (.*)\n", source)[1]] = source
    return sources


@pytest.fixture
def folder(tmp_path):
    grow(tmp_path / "photos", per_class=20, shape=(3, 8, 8))
    for name, source in programs().items():
        (tmp_path / name).with_suffix(".py").write_text(source)
    return tmp_path


def weights(text):
    (value,) = re.findall(r"^Weights: (\w{64})$", text, re.M)
    return value


def test_programs_are_python():
    sources = programs()
    assert sorted(sources) == ["mpidl", "small_ddp.py", "small_lightning.py"]
    for source in sources.values():
        ast.parse(source)
        assert max(map(len, source.splitlines())) <= 60  # fits into a column of the site


def test_program_for_mpidl_gives_the_same_weights_and_resumes(folder):
    hashes = set()
    for ranks in (1, 2):
        place = folder / str(ranks)
        place.mkdir()
        (place / "photos").symlink_to(folder / "photos")
        first = pool.run(ranks, folder / "mpidl.py", cwd=place, check=0).stdout
        second = pool.run(ranks, folder / "mpidl.py", cwd=place, check=0).stdout
        assert "Epoch: 5, Loss: " in first and "Epoch: 5, Loss: " not in second
        assert (place / "small.h5").is_file()
        hashes |= {weights(first), weights(second)}
    assert len(hashes) == 1


@pytest.mark.slow("jobs")
@pytest.mark.timeout(300)
def test_program_for_ddp_trains_and_resumes(folder):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed: pip install 'mpidl[bench]'")
    (folder / "torchvision.py").write_text(TORCHVISION)
    words = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    words += ["--nproc-per-node", "2", folder / "small_ddp.py"]
    env = {"OMP_NUM_THREADS": 1, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": folder}
    first, second = (
        launcher.finish(launcher.start(None, *words, env=env, cwd=folder)) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "Epoch 5, loss " in first.stdout and "Epoch" not in second.stdout
    assert weights(first.stdout) == weights(second.stdout)
    assert (folder / "small.pt").is_file()
