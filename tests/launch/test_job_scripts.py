"""run/train.slurm and run/scaling.slurm: which jobs go back to the queue. Programs of the tests
stand for Slurm and for the training."""

import os
import subprocess

import pytest
from launcher import ROOT

from mpidl.report import status, stop_file

TRAINING = '#!/bin/sh\nmkdir -p "$RUN" && cp status.json "$RUN" && exit 75\n'
SCONTROL = '#!/bin/sh\necho "$@" > scontrol\n'
FOLDERS = {"train": "runs/job-7", "scaling": "runs/scaling-7/ranks-2"}  # without --out


@pytest.mark.parametrize("script", FOLDERS)
@pytest.mark.parametrize(
    ("reason", "is_requeued"), [(stop_file.REASON, False), ("SIGUSR1", True), (None, True)]
)
def test_a_run_that_a_person_stopped_is_not_requeued(tmp_path, script, reason, is_requeued):
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name, text in (("python", TRAINING), ("srun", TRAINING), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder.parent / "mpidl-mpi").write_text("mpich\n")
    status.write(tmp_path, status.Status(stopped=reason))
    earlier = tmp_path / FOLDERS["scaling"].replace("2", "1")  # a run that an earlier job stopped
    earlier.mkdir(parents=True)
    status.write(earlier, status.Status(stopped=stop_file.REASON))
    os.utime(earlier / status.NAME, (0, 0))
    variables = {"MPIDL_VENV": str(folder.parent), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    result = subprocess.run(
        ["bash", ROOT / "run" / f"{script}.slurm"],
        env=os.environ | variables | {"RUN": FOLDERS[script]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 75, result.stdout + result.stderr
    assert (tmp_path / "scontrol").exists() == is_requeued
    expected = "back in the queue" if is_requeued else f"{FOLDERS[script]}/stop: not requeued"
    assert expected in result.stdout.splitlines()[-1]
