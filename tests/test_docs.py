"""The Python blocks of the documents run, each document's in one namespace.

The digit set is stood in for by a small one, and `photos` is a small folder of images.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from images import grow

import mpidl as dl

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path):
    """(number of its first line, source) of each block of Python in a document."""
    text = path.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        yield text[: found.start()].count("\n") + 1, found[1]


def small_digits(world=None):
    pixels = np.arange(80 * 784).reshape(80, 28, 28) * 31 % 251
    return dl.ArrayDatastore(pixels.astype(np.uint8), np.arange(80) % 10)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if list(blocks(p))], ids=lambda p: p.name)
def test_python_blocks_run(path, world, tmp_path, monkeypatch):
    folder = Path(world.broadcast(str(tmp_path)))  # one for all ranks, as a program would see it
    if world.rank == 0:
        grow(folder / "photos", per_class=10, shape=(3, 8, 8))
    world.barrier()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(dl.data, "digits", small_digits)
    namespace = {}
    for line, source in blocks(path):
        # so that a traceback names the document and the line
        code = compile("\n" * line + source, str(path), "exec")
        exec(code, namespace)
    world.barrier()


def test_linked_files_exist():
    missing = [
        f"{path.name}: {target}"
        for path in [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert missing == []
