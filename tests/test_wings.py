"""Test that each wing can be removed: its folder, its tests and its line in the table."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpidl.wings import WINGS

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("mpidl", "kernels", "tests", "benchmarks", "docs", ".ci", "run")
FILES = ("mpidl_command.py", "pyproject.toml", "setup.cfg", "setup.py", "README.md")
# The rule of imports, tests of the rooms that used to import wings, and one test of each wing.
REST = (
    *("test_imports.py::test_the_package_follows_the_rules", "test_lazy.py", "test_startup.py"),
    *("cli/test_arguments.py", "cli/test_predict_command.py", "cli/test_start.py"),
    *("comm/test_exchange.py", "nn/test_network.py"),
    *("report/test_history.py", "report/test_svg_charts.py", "training/files/test_run_folder.py"),
    *("training/files/test_lock_holder.py", "training/test_trainer.py"),
    *("interchange/test_weights.py", "jobs/test_job_words.py", "performance/test_model.py"),
    *("data/test_registry.py", "data/formats/test_packed.py", "data/storage/test_presigned.py"),
    *("report/live/test_run.py", "report/page/test_run_page.py", "sweeps/test_sweep_file.py"),
    *("trackers/test_trackers.py", "certificates/test_chain.py", "published/test_sources.py"),
    *("explanations/test_methods.py", "tiles/test_grid.py"),
)
# For each wing, a program that uses it.
USES = {
    "backends.gpu": "import mpidl.backends.gpu.launching",
    "certificates": "import mpidl.certificates.chain",
    "data.storage": "dl.data.open_data('s3://bucket/images')",
    "explanations": "dl.explain",
    "interchange": "dl.save_onnx",
    "jobs": "dl.launch",
    "performance": "import mpidl.performance",
    "published": "dl.pretrained",
    "report.live": "import mpidl.report.live.server",
    "report.page": "import mpidl.report.page",
    "sweeps": "dl.sweep",
    "tiles": "import mpidl.tiles.tiled",
    "trackers": "dl.MLflowHook",
}
# For each wing without a command, a command that uses it.
TRAINING_WITH = {
    "backends.gpu": ("train", "--max-iterations", "1", "--device", "gpu"),
    "certificates": ("train", "--max-iterations", "1", "--certify"),
    "data.storage": ("train", "--data", "s3://bucket/images"),
    "tiles": ("predict", "--model", "model.h5", "--data", "images", "--tile", "64", "--out", "out"),
    "trackers": ("train", "--max-iterations", "1", "--tensorboard"),
}


def copied(folder):
    """Copy the checkout into a folder, and return the environment of programs that use the copy."""
    ignored = shutil.ignore_patterns("__pycache__", "*.ipynb", "site", "pictures")
    for name in COPIED:
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    return os.environ | {"PYTHONPATH": str(folder)}


def remove(wing, folder):
    """Remove a wing from a copy, except for its line in the table."""
    shutil.rmtree(folder / "mpidl" / wing.replace(".", "/"))
    shutil.rmtree(folder / "tests" / wing.replace(".", "/"))


def remove_line(wing, folder):
    """Remove the line of a wing from the table."""
    table = folder / "mpidl" / "wings.py"
    line = rf'    "{wing}": Wing\(.*?\),\n(?=    "|}})'
    text, count = re.subn(line, "", table.read_text(), flags=re.S)
    assert count == 1
    table.write_text(text)


def run(folder, environment, *words):
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow("wings")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wing", WINGS)
def test_the_rest_works_without_a_wing(wing, tmp_path):
    environment = copied(tmp_path)
    remove(wing, tmp_path)
    remove_line(wing, tmp_path)
    tests = [f"tests/{test}" for test in REST if (tmp_path / "tests" / test.split(":")[0]).exists()]
    result = run(tmp_path, environment, "-m", "pytest", "-q", "-x", *tests)
    assert result.returncode == 0, result.stdout[-5000:]
    words = "--max-iterations", "2", "--out", "run"
    result = run(tmp_path, environment, "-m", "mpidl.train", *words)
    assert "weights_sha256" in result.stdout, result.stderr
    help_text = run(tmp_path, environment, "mpidl_command.py", "--help").stdout
    assert "Train a network" in help_text
    assert not WINGS[wing].command or WINGS[wing].summary not in help_text


@pytest.fixture(scope="module")
def without_wings(tmp_path_factory):
    """A copy of the package without the folders of the wings, and its environment."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "mpidl", folder / "mpidl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mpidl_command.py", folder)
    for wing in WINGS:
        shutil.rmtree(folder / "mpidl" / wing.replace(".", "/"))
    return folder, os.environ | {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("wing", WINGS)
def test_a_missing_wing_is_one_line(wing, without_wings):
    folder, environment = without_wings
    line = f"expected the folder mpidl/{wing.replace('.', '/')}/ ({WINGS[wing].purpose})"
    words = [WINGS[wing].command, "--help"] if WINGS[wing].command else TRAINING_WITH[wing]
    result = run(folder, environment, "mpidl_command.py", *words)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert result.stderr.startswith(f"mpidl: {line}, which this copy of mpidl does not have")
    program = f"import mpidl as dl\ntry:\n    {USES[wing]}\n"
    program += "except dl.UserError as error:\n    print(error)"
    assert run(folder, environment, "-c", program).stdout.startswith(line)


def test_the_package_without_wings_has_the_other_names(without_wings):
    folder, environment = without_wings
    program = "from mpidl import *; import mpidl as dl; dl.train, dl.save_model\n"
    program += "print(dl.__file__, 'save_onnx' in dir(dl), 'sweep' in dir(dl), 'train' in dir(dl))"
    result = run(folder, environment, "-c", program)
    assert result.stdout == f"{folder / 'mpidl' / '__init__.py'} False False True\n", result.stderr


def test_each_wing_has_a_purpose_and_tests():
    for folder, wing in WINGS.items():
        command = ROOT / "mpidl" / folder.replace(".", "/") / "command.py"
        assert command.exists() == bool(wing.command) == bool(wing.summary)
        assert (ROOT / "tests" / folder.replace(".", "/")).is_dir()
        assert wing.purpose
