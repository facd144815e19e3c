"""Run both calls of `run/gpu-check` from end to end, on a stand-in for CuPy on host memory."""

import importlib.util
import json
import tarfile
from pathlib import Path

import pytest
import stand_in

ROOT = Path(__file__).resolve().parents[2]
STAGES = {
    "quick": ["machine", "parity", "training", "timing"],
    "second": ["machine", "memcheck", "racecheck", "identity", "tests", "timing"],
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("call", [pytest.param("quick", marks=pytest.mark.slow("gpu")), "second"])
def test_a_call_from_end_to_end(call, tmp_path):
    """Every stage ends, all checks pass, and the archive is the only file of the call."""
    out = tmp_path / "out"
    words = ["--small", "--limit", "2000", "--out", out]
    job = stand_in.run(tmp_path, "bash", ROOT / "run" / "gpu-check", f"--{call}", *words)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "Traceback" not in job.stdout + job.stderr  # of a stage, or of a __del__ at exit
    assert [path.name for path in out.iterdir()] == [f"{call}.tar"]
    with tarfile.open(out / f"{call}.tar") as tar:
        files = {name: tar.extractfile(name).read().decode() for name in tar.getnames()}
    record = json.loads(files["gpu-check.json"])
    stages = {stage["stage"]: stage for stage in record["stages"]}
    assert list(stages) == STAGES[call] and all(s["finished"] for s in stages.values())
    assert record["call"] == call and record["failed"] == []
    assert {f"{name}.log" for name in STAGES[call]} <= set(files)
    assert "### timing" in files["gpu-check.md"]
    titles = {table["title"] for table in stages["timing"]["tables"]}
    assert any("kernels by time" in title for title in titles)
    variants = {row[1] for table in stages["timing"]["tables"] for row in table["rows"]}
    has_torch = importlib.util.find_spec("torch") is not None
    assert ("PyTorch, eager" in variants) == has_torch
    skipped = "PyTorch's side is skipped: it is not installed"
    assert (skipped in stages["timing"]["notes"]) != has_torch
    if call == "second":
        identity = {check["what"] for check in stages["identity"]["checks"]}
        assert {"2 ranks", "4 ranks", "1 rank(s), resumed on 4 after iteration 1"} <= identity
        assert {"memcheck.txt", "racecheck.txt", "pytest.txt"} <= set(files)
