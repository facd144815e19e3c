"""Test that MPI starts under Slurm although Slurm reads at most 1024 characters of a line."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mpi4py import MPI

from mpidl.ranks import slurm_lines

SUPPORT = Path(__file__).resolve().parents[1] / "support"
LONGEST_READ = 1024
JOIN = "print(MPI.COMM_WORLD.allreduce(2 + MPI.COMM_WORLD.rank))"
MAXES = "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"


class Daemon(threading.Thread):
    """A server of PMI 1 for two nodes with a rank each. Like Slurm, it reads a line only once.

    If a line is longer than `LONGEST_READ`, the daemon kills the ranks.
    """

    def __init__(self):
        super().__init__(daemon=True)
        pairs = [socket.socketpair() for _ in range(2)]
        self.sides, self.rank_sides = zip(*pairs, strict=True)
        self.values = {"PMI_process_mapping": "(vector,(0,2,1))"}
        self.waiting, self.longest, self.cut = [], 0, []
        self.ranks = []

    def launch(self, program):
        """Start `python -c program` on both ranks, and return the output of each rank."""
        names = ("PMI_", "PMIX_", "MPI_", "HYDRA", "HYDI", "SLURM_", "OMPI_")
        env = {name: text for name, text in os.environ.items() if not name.startswith(names)}
        paths = [str(SUPPORT), str(SUPPORT.parents[1]), env.get("PYTHONPATH", "")]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "UCX_MODULES": "^ib,rdmacm"}
        env |= {"PMI_SIZE": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
        for rank, side in enumerate(self.rank_sides):
            number = side.fileno()
            variables = {
                "PMI_FD": number,
                "PMI_RANK": rank,
                "SLURM_PROCID": rank,
                "SLURM_NODEID": rank,
            }
            self.ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", f"{program}\n{JOIN}"],
                    env=env | {name: str(value) for name, value in variables.items()},
                    pass_fds=[number],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            side.close()
        self.start()
        outputs = [rank.communicate()[0] for rank in self.ranks]
        self.join()
        return outputs

    def run(self):
        sides = list(self.sides)
        while sides and not self.cut:
            for side in select.select(sides, [], [])[0]:
                line = side.recv(LONGEST_READ).decode()
                self.longest = max(self.longest, len(line))
                if not line:
                    sides.remove(side)
                elif line.endswith("\n"):
                    self.answer(side, dict(re.findall(r"(\w+)=(\S*)", line)))
                else:
                    self.cut.append(line)
        for rank in self.ranks if self.cut else ():
            rank.send_signal(signal.SIGKILL)

    def answer(self, side, request):
        command, name = request["cmd"], request.get("key")
        if command == "barrier_in":
            self.waiting.append(side)
            if len(self.waiting) < len(self.sides):
                return
        if command == "put":
            self.values[name] = request["value"]
        text = f"rc=0 value={self.values[name]}" if name in self.values else "rc=1"
        reply = {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": MAXES,
            "get_appnum": "cmd=appnum rc=0 appnum=-1",
            "get_universe_size": "cmd=universe_size rc=0 size=2",
            "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=4294967295.4294967295",
            "put": "cmd=put_result rc=0",
            "get": f"cmd=get_result {text}",
            "barrier_in": "cmd=barrier_out rc=0",
            "finalize": "cmd=finalize_ack rc=0",
        }[command]
        receivers = self.waiting if command == "barrier_in" else [side]
        for receiver in receivers:
            receiver.sendall(f"{reply}\n".encode())
        if command == "barrier_in":
            self.waiting = []


only_mpich = pytest.mark.skipif(
    MPI.get_vendor()[0] != "MPICH", reason="only MPICH sends these lines to Slurm"
)


@only_mpich
def test_mpi_starts_with_addresses_that_contain_few_zeros():
    daemon = Daemon()
    imports = "from mpidl.ranks import serial\nimport full_memory"
    outputs = daemon.launch(f"{imports}\nMPI = serial.load()")
    assert outputs == ["5\n", "5\n"]
    assert not daemon.cut
    assert slurm_lines.LONGEST_VALUE < daemon.longest < LONGEST_READ


@only_mpich
def test_mpi_alone_sends_lines_that_slurm_cuts():
    """Negative control: without mpidl, a line is longer than Slurm reads."""
    daemon = Daemon()
    daemon.launch("import full_memory\nfrom mpi4py import MPI")
    (line,) = daemon.cut
    assert len(line) == LONGEST_READ and line.startswith("cmd=put ")


def test_only_the_longest_value_is_changed():
    lower = slurm_lines.lower_longest_value
    assert lower(f"{MAXES}\n".encode()) == f"{MAXES[:-4]}900\n".encode()
    for line in (b"cmd=maxes rc=0 vallen_max=512\n", b"cmd=get_result value=vallen_max=1024\n"):
        assert lower(line) == line


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_LOCALID": "0"},  # srun with another type --mpi
        {"PMI_FD": "0", "MPI_LOCALNRANKS": "2", "SLURM_LOCALID": "0"},  # mpirun in a Slurm job
    ],
)
def test_other_launchers_are_left_alone(monkeypatch, variables):
    for name in ("PMI_FD", "MPI_LOCALNRANKS", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = os.fstat(0)
    with slurm_lines.shortened():
        assert os.fstat(0) == before


def test_the_end_of_slurm_reaches_mpich(monkeypatch):
    """If Slurm's daemon ends, MPICH must read the end of its socket, as without the relay."""
    slurm, rank = socket.socketpair()
    monkeypatch.delenv("MPI_LOCALNRANKS", raising=False)
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("PMI_FD", str(rank.fileno()))
    with slurm_lines.shortened():
        slurm.sendall(b"cmd=barrier_out rc=0\n")
        assert rank.recv(1000) == b"cmd=barrier_out rc=0\n"
        slurm.close()
        assert rank.recv(1000) == b""
    rank.close()
