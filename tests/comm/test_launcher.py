"""The command line that starts ranks."""

import pytest

import mpidl as dl
from mpidl.comm.launcher import launcher


def test_srun_fills_nodes(monkeypatch, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text("")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("NTASKS_PER_NODE", "NTASKS", "NNODES", "CPUS_PER_TASK"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    monkeypatch.delenv("MPIDL_SRUN_MPI", raising=False)
    assert launcher(6, True)[1:] == ["-K", "--ntasks=6"]
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.setenv("MPIDL_SRUN_MPI", "pmi2")
    assert launcher(6, True)[2:] == [
        *("--ntasks=6", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3", "--mpi=pmi2")
    ]
    assert launcher(3, True)[3:5] == ["--nodes=1", "--ntasks-per-node=3"]
    srun.unlink()
    with pytest.raises(dl.UserError, match="--srun: expected srun on PATH"):
        launcher(2, True)
