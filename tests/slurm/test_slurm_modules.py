"""Test jobs that load mpidl by `module load`: the weights are the same as without modules."""

import environments
import jobs
import launcher
import pytest
import trainings

pytestmark = [pytest.mark.slow("slurm"), pytest.mark.timeout(240)]
LMOD, _, ENVIRONMENT_MODULES = environments.MODULE_SYSTEMS


@pytest.fixture
def module_files(tmp_path):
    """Return a folder of module files for a checkout with the current environment."""
    trainings.make_environment(tmp_path / "checkout" / ".venv", launcher.ROOT)
    environments.copy_module_files(tmp_path / "modules", tmp_path / "checkout")
    return tmp_path / "modules"


def words_of(shapes, out):
    return " ".join(map(str, trainings.train_words(shapes, out)))


@pytest.mark.parametrize("system", [LMOD, ENVIRONMENT_MODULES], ids=["lmod", "environment-modules"])
def test_srun_and_mpirun(cluster, shapes, tmp_path, expected_hash, module_files, system):
    """A batch script loads the module and starts ranks by srun and by mpirun."""
    script = tmp_path / "job.sh"
    script.write_text(f"""#!/bin/bash
{environments.use_modules(system, module_files)}
set -e
module load mpidl
srun --mpi={trainings.MPI_TYPE} mpidl train {words_of(shapes, tmp_path / "srun")}
mpirun -n 2 mpidl train {words_of(shapes, tmp_path / "mpirun")}
module unload mpidl
! type -P mpidl
""")
    env = {"PATH": "/usr/bin:/bin:/usr/sbin"}
    cluster.submit(tmp_path, "--nodes=2", "--ntasks-per-node=1", script, env=env).wait("COMPLETED")
    for name in ("srun", "mpirun"):
        assert jobs.weights_hash(tmp_path / name) == expected_hash
        assert jobs.summary(tmp_path / name)["ranks"] == 2


def test_the_job_script(cluster, shapes, tmp_path, expected_hash, module_files):
    """The module tells run/train.slurm where the environment is."""
    submit = f"sbatch --wait --nodes=2 --ntasks-per-node=1 {launcher.ROOT}/run/train.slurm"
    script = f"""{environments.use_modules(LMOD, module_files)}
module load mpidl
{submit} {words_of(shapes, tmp_path / "run")}
"""
    cluster.run("bash", "-c", script, cwd=tmp_path, env={"PATH": "/usr/bin:/bin:/usr/sbin"})
    assert jobs.weights_hash(tmp_path / "run") == expected_hash
