"""Test the job script of docs/cluster.md for installations without a checkout, on a real Slurm."""

import documented_commands
import launcher
import pytest
import trainings


def own_script(folder, words):
    """Write the page's script with other arguments of the training, and return its path."""
    blocks = documented_commands.fences((launcher.ROOT / "docs" / "cluster.md").read_text())
    (script,) = [source for _, _, source in blocks if source.startswith("#!/bin/bash")]
    lines = script.splitlines()
    (arguments,) = [i for i, line in enumerate(lines) if line.startswith("set -- ")]
    lines[arguments] = " ".join(["set --", *map(str, words)])
    script = "\n".join(lines).replace("/scratch/run7", str(folder / "run"))
    script = script.replace(".venv", str(folder / "venv")).replace("pmi2", trainings.MPI_TYPE)
    path = folder / "own.sh"
    path.write_text(script + "\n")
    return path


@pytest.mark.slow("slurm")
@pytest.mark.timeout(240)
def test_script_without_a_checkout_continues_after_the_time_limit(
    cluster, shapes, expected_hash, tmp_path
):
    """Slurm may send the signal up to a minute early."""
    pace, out = tmp_path / "pace", tmp_path / "run"
    pace.touch()
    trainings.make_environment(tmp_path / "venv", launcher.ROOT)
    script = own_script(tmp_path, trainings.train_words(shapes, out))
    options = ["--nodes=2", "--ntasks-per-node=2", "--time=1", "--signal=USR1@20"]
    job = cluster.submit(tmp_path, *options, script, env={"PACE_FILE": pace})
    training = trainings.Training(job, out, pace)
    try:
        training.wait_for_steps()
        job.wait_for_requeue()
        cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
        assert training.finish() == expected_hash
    finally:
        cluster.finish("scancel", job.number)
