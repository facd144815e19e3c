"""Test the documentation site: its pages, pictures and links, and that notebooks run."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check_links
import documented_commands
import page_lists
import pytest
import run_notebooks
import run_tutorial

ROOT = documented_commands.ROOT
DOCS = ROOT / "docs"
PHOTOGRAPHS = "/usr/share/datasets/fashion-mnist"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
MIN_PICTURES = 10
LARGE = 200_000  # bytes


def test_pictures_exist_are_small_described_and_made_by_a_script():
    pages = {}
    for page in DOCS.glob("*.md"):
        for text, target in PICTURE.findall(page.read_text()):
            assert len(text) > 10, f"{page.name}: {target} has no description"
            pages[page.parent / target] = page.name
    assert len(pages) >= MIN_PICTURES
    tags = [tag for path in NOTEBOOKS for tag in re.findall(r'"picture-(\w+)"', path.read_text())]
    programs = "".join(path.read_text() for path in DOCS.glob("*.py"))
    programs += " ".join(re.findall("--picture .*", (DOCS / "gallery.md").read_text()))
    for path, page in pages.items():
        assert path.is_file(), f"{page}: no picture {path.name}"
        assert path.stat().st_size < LARGE, f"{path.name} is larger than {LARGE} bytes"
        is_named = path.stem in tags or re.search(rf"\b{re.escape(path.stem)}\b", programs)
        assert is_named, f"{path.name}: no program makes it"


def test_every_page_is_in_one_list():
    listed = page_lists.listed_pages()
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert {"guide", "tutorial", "cluster", "matlab", "data", "BENCHMARKS"} <= listed & pages
    assert "\n{rest}\n" in (DOCS / "topics.md").read_text()  # lists new pages


def test_notebooks_hold_their_outputs():
    assert len(NOTEBOOKS) >= 2
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["source"]]
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert not [output for output in outputs if output["output_type"] == "error"]
        assert any("image/png" in output.get("data", {}) for output in outputs), path.name
        assert path.stat().st_size < 4 * LARGE
        text = path.read_text()
        assert not re.search(r"/(home|root|tmp|work)/", text), f"{path.name} has an absolute path"


def test_broken_links_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="one"><a href="b.html#two">b</a><img src="c.png">')
    (tmp_path / "b.html").write_text(
        '<p id="two"><a href="a.html#one">a</a><a href="a.html#none">a</a><a href="https://x">'
    )
    lines, count = check_links.broken_links(tmp_path)
    assert lines == ["a.html: c.png: no such file", "b.html: a.html#none: no such anchor"]
    assert count == 4


@pytest.mark.slow("site")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, monkeypatch):
    if PHOTOGRAPHS in path.read_text() and not Path(PHOTOGRAPHS).is_dir():
        pytest.skip(
            f"the notebook needs the Debian package dataset-fashion-mnist: no {PHOTOGRAPHS}"
        )
    monkeypatch.setenv("WHITE_PAPER_EPOCHS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = run_notebooks.execute(path)
    printed = json.dumps(notebook)
    assert "sha256" in printed and "error" not in [
        output.output_type for cell in notebook.cells for output in cell.get("outputs", [])
    ]


# Parts of a training run's output that differ between runs.
TIMES = re.compile(r"(Images/s: )\d+|(Elapsed: |time: )[\d:]+")


@pytest.mark.slow("site")
@pytest.mark.timeout(300)
def test_the_tutorial_prints_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    blocks = run_tutorial.outputs(run_tutorial.PAGE.read_text(), tmp_path)
    count = 0
    for commands, output, printed in blocks:
        assert TIMES.sub(r"\1\2T", printed) == TIMES.sub(r"\1\2T", output), commands
        count += 1
    assert count >= 8


@pytest.mark.slow("site")
@pytest.mark.timeout(300)
def test_the_site_builds_without_warnings(tmp_path):
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed: pip install 'mpidl[docs]'")
    words = ["-m", "sphinx", "-c", DOCS, "-b", "html", "-W", "-q", "-d", tmp_path / "doctrees"]
    command = [sys.executable, *words, ROOT, tmp_path / "site"]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines, count = check_links.broken_links(Path(tmp_path / "site"))
    assert lines == [] and count > 1000


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_pages_are_made_again_on_an_idle_machine_only(tmp_path, is_busy):
    """On a busy machine, run/site --remake must end before its first program, with exit code 2.

    The measurement reads a fake file of the kernel. Stubs replace all other programs.
    """
    (tmp_path / "run").mkdir()
    shutil.copy(ROOT / "run" / "site", tmp_path / "run")
    common = (ROOT / "run" / "common.sh").read_text()
    stubs = f"prepare() {{ PATH={tmp_path}/bin:$PATH; }}\nadd_extra() {{ :; }}\n"
    (tmp_path / "run" / "common.sh").write_text(common + stubs)
    before, after = "cpu0 0 0 0 0 0 0 0 0", f"cpu0 {80 if is_busy else 1} 0 0 20 0 0 0 0"
    (tmp_path / "check.py").write_text(
        f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT / "docs")!r})
import check_idle
path = Path({str(tmp_path / "stat")!r})
path.write_text({before!r})
os.sched_getaffinity = lambda pid: {{0}}
time.sleep = lambda seconds: path.write_text({after!r})
sys.exit(check_idle.main(sys.argv[1], path))
"""
    )
    program = f"""#!/bin/sh
echo "$1" >>{tmp_path}/programs
[ "$1" != docs/check_idle.py ] || exec {sys.executable} {tmp_path}/check.py "$2"
"""
    (tmp_path / "bin").mkdir()
    for name in ("python", "tmux", "chromium", "chromedriver"):
        (tmp_path / "bin" / name).write_text(program)
        (tmp_path / "bin" / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    words = ["bash", tmp_path / "run" / "site", "--remake"]
    result = subprocess.run(words, env=env, capture_output=True, text=True)
    programs = (tmp_path / "programs").read_text().split()
    assert programs[0] == "docs/check_idle.py"
    if is_busy:
        assert result.returncode == 2 and len(programs) == 1
        assert result.stderr == (
            "run/site --remake: expected idle cores, because pages and pictures show speeds: "
            "at most 10% busy, found 80%; end the other programs first\n"
        )
    else:
        assert "docs/make_pictures.py" in programs and "docs/run_notebooks.py" in programs
        assert "expected" not in result.stderr
