"""Test `srun python -m mpidl.train` on a real Slurm: the weights, and errors about --mpi."""

import os
import sys

import jobs
import launcher
import pytest
import trainings
from cluster import wait_until

from mpidl.ranks import foreign_launcher

pytestmark = [pytest.mark.slow("slurm"), pytest.mark.timeout(240)]
OPENMPI = launcher.ROOT / ".venv-openmpi" / "bin" / "python"


def words_of(
    shapes, out, *options, nodes=2, tasks=2, mpi=trainings.MPI_TYPE, python=sys.executable
):
    """Return the command-line arguments for a training run under srun."""
    start = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--mpi={mpi}"]
    return [*start, python, "-m", "mpidl.train", *trainings.train_words(shapes, out, *options)]


@pytest.mark.parametrize(("nodes", "tasks"), [(2, 2), (3, 1), (3, 2)])
def test_the_weights_are_those_of_one_rank(cluster, shapes, tmp_path, expected_hash, nodes, tasks):
    cluster.run(*words_of(shapes, tmp_path / "run", nodes=nodes, tasks=tasks))
    assert jobs.weights_hash(tmp_path / "run") == expected_hash
    assert jobs.summary(tmp_path / "run")["ranks"] == nodes * tasks


def test_ranks_with_few_zeros_in_memory(cluster):
    """MPICH then sends lines that are too long for Slurm, and mpidl must prevent this."""
    if trainings.MPI_TYPE != "pmi2":
        pytest.skip("only MPICH sends its memory to Slurm")
    statements = "import mpidl as dl, full_memory; print(dl.World().gop('sum', 2))"
    paths = [str(launcher.ROOT / "tests" / "support"), cluster.environment["PYTHONPATH"]]
    words = ["srun", "--nodes=3", "--ntasks-per-node=2", "--mpi=pmi2", sys.executable, "-c"]
    output = cluster.run(*words, statements, env={"PYTHONPATH": os.pathsep.join(paths)})
    assert output.splitlines() == ["12"] * 6


def test_open_mpi(cluster, shapes, tmp_path, expected_hash):
    if not OPENMPI.exists():
        pytest.skip("no environment with Open MPI (MPIDL_MPI=openmpi run/install)")
    words = words_of(shapes, tmp_path / "run", mpi="pmix", python=OPENMPI)
    cluster.run(*words, env={"PMIX_MCA_psec": "native", "OMPI_MCA_btl_tcp_if_include": "lo"})
    assert jobs.weights_hash(tmp_path / "run") == expected_hash


def test_a_signal_and_a_resume_on_other_nodes(cluster, shapes, tmp_path, expected_hash):
    pace = tmp_path / "pace"
    pace.touch()
    words = words_of(shapes, tmp_path / "run", nodes=3, tasks=1)
    with cluster.start(*words, env={"PACE_FILE": pace}) as step:
        wait_until((tmp_path / "run" / "metrics.jsonl").exists)
        wait_until(lambda: len(jobs.iterations(tmp_path / "run")) > 3)
        cluster.run("scancel", "--signal=USR1", cluster.run("squeue", "-h", "-o", "%i").strip())
        _, errors = step.communicate()
    assert step.returncode == jobs.STOPPED, errors
    cluster.run(*words_of(shapes, tmp_path / "run", "--resume", tmp_path / "run"))
    assert jobs.weights_hash(tmp_path / "run") == expected_hash


def test_the_wrong_type(cluster, shapes, tmp_path):
    """If srun has the wrong type --mpi, one line must name the right type."""
    if trainings.MPI_TYPE == "pmix":
        pytest.skip("Open MPI ends a process that srun started with another type")
    result = cluster.finish(*words_of(shapes, tmp_path / "run", mpi="none"))
    assert result.returncode == 2, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("mpidl: ")]
    assert "expected srun --mpi=pmi2 (srun --mpi=list: " in line


def test_the_types_are_listed(cluster):
    types = foreign_launcher.parse_srun_types(cluster.run("srun", "--mpi=list"))
    assert {"none", "pmi2"} <= set(types)


def test_verify_starts_srun(cluster, tmp_path):
    """A job of 2 x 2 tasks verifies one rank, ranks of one node, and ranks of two nodes."""
    words = "-m mpidl.verify --srun --ranks 1,2,4 --max-iterations 2 --batch-size 64"
    options = ["--nodes=2", "--ntasks-per-node=2", f"--wrap={sys.executable} {words}"]
    job = cluster.submit(tmp_path, *options, env={"MPIDL_SRUN_MPI": trainings.MPI_TYPE})
    job.wait("COMPLETED")
    assert "the same weights, byte for byte, on 1, 2, 4 ranks" in job.log()
