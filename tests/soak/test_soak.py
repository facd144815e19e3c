"""Test short random trials and their replay, and check that the trials detect problems."""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time

import launcher
import parsers
import pytest

from mpidl.errors import UserError
from mpidl.training.files import checkpoint

from . import ROOT, inputs, kills


def soak(*words):
    """Run a trial, which must find no problem."""
    command = [sys.executable, "-m", "tests.soak", *map(str, words)]
    result = subprocess.run(
        command, cwd=ROOT, env=launcher.environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow("soak")
@pytest.mark.timeout(600)
def test_trainings_that_are_killed_and_a_replay(tmp_path):
    log = tmp_path / "log"
    lines = soak("kills", "--seed", 1, "--kills", 8, "--log", log)
    assert "0 lost, 0 torn, 0 hang, 0 problems" in lines[-1]
    *plans, _ = kills.logged_plans(log, 0)[0]
    assert plans == list(kills.drawn_plans(1, 0))[: len(plans)]
    soak("kills", "--replay", log, "--chain", 0, "--log", tmp_path / "second")
    ((number, replayed),) = kills.logged_plans(tmp_path / "second", None).items()
    assert number == 0 and replayed[:-1] == plans[: len(replayed) - 1]


@pytest.mark.slow("soak")
@pytest.mark.timeout(600)
def test_damaged_inputs(tmp_path):
    (*_, line) = soak("inputs", "--seed", 1, "--count", 4000, "--log", tmp_path / "log")
    assert line.endswith(": 0 problems")


def test_plans_depend_on_seed_and_chain_alone():
    plans = list(kills.drawn_plans(1, 2))
    assert plans == list(kills.drawn_plans(1, 2)) == json.loads(json.dumps(plans))
    assert plans != list(kills.drawn_plans(1, 3)) != list(kills.drawn_plans(2, 3))
    assert all(a["ranks"] != b["ranks"] for a, b in zip(plans, plans[1:], strict=False))
    assert plans[-1]["kind"] == "none"


@pytest.fixture
def chain(tmp_path):
    for name in ("work", "disk"):
        (tmp_path / name).mkdir()
    chain = kills.Chain(tmp_path, 0, None, None, is_private=False)
    chain.out.mkdir()
    return chain


def save(chain, iteration):
    facts = parsers.FACTS | {"position": {"iteration": iteration}}
    checkpoint.save(str(chain.out), parsers.TABLES, facts)


def test_a_checkpoint_that_goes_back_is_noticed(chain):
    save(chain, 3)
    chain._check_files(None, {})
    save(chain, 2)
    assert chain.problems == []
    chain._check_files(None, {})
    assert chain.problems == ["lost: iteration 2 after 3"]


def test_a_torn_checkpoint_is_noticed(chain):
    save(chain, 3)
    save(chain, 4)
    path = chain.out / checkpoint.PREVIOUS
    path.write_bytes(path.read_bytes()[:500])
    assert chain._check_generations() == 4
    assert [problem.partition(": it")[0] for problem in chain.problems] == [
        f"torn: {checkpoint.PREVIOUS}"
    ]


def test_processes_of_a_chain_are_noticed(tmp_path):
    """Orphaned processes must be found, too."""
    shell = f"{sys.executable} -c 'import time; time.sleep(600)' &"
    job = kills.Job(["sh", "-c", shell], tmp_path, f"test-{os.getpid()}")
    job.process.wait()
    assert len(job.members()) == 1
    assert job.wait(0.2) is None
    job.kill()
    assert job.wait(60) is not None


def read_badly(path):
    content = path.read_bytes()
    if b"5" in content[:20]:
        ctypes.string_at(0)
    if b"6" in content[:20]:
        raise KeyError("six")
    if b"7" in content[:20]:
        return bytes(inputs.MEMORY)
    if b"8" in content[:20]:
        time.sleep(600)
    if b"9" in content[:20]:
        raise UserError("nine")
    return True


def test_each_kind_of_problem_is_noticed_and_its_input_kept(tmp_path, monkeypatch):
    def prepare(folder):
        path = folder / "a"
        path.write_bytes(b"1")
        return path, lambda: parsers.attempt(read_badly, path)

    monkeypatch.setattr(inputs, "WAIT_SECONDS", 5)
    monkeypatch.setattr(inputs, "content_of", lambda seed, name, number, *_: b"%d" % number)
    monkeypatch.setattr(parsers, "PARSERS", {"bad": parsers.Parser(prepare)})
    options = argparse.Namespace(
        seed=1, count=13, first=0, parser=None, workers=1, log=tmp_path / "log"
    )
    fuzzing = inputs.Fuzzing(options, tmp_path)
    fuzzing.run()
    assert fuzzing.counts == {"bad": 13} and fuzzing.report() == 1
    problems = dict(problem.split(": ", 1) for problem in fuzzing.problems)
    assert problems["bad 5"] == "SIGSEGV" and problems["bad 6"] == "KeyError: 'six'"
    assert "MB of address space" in problems["bad 7"] and problems["bad 8"].startswith("hang: ")
    assert set(problems) == {"bad 5", "bad 6", "bad 7", "bad 8"}
    assert (tmp_path / "log-bad-6" / "files" / "a").read_bytes() == b"6"
    assert "read_badly" in (tmp_path / "log-bad-8" / "error").read_text()
