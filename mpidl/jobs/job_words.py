"""Parse a training command under mpirun or srun, and adapt the command if hosts are lost."""

from __future__ import annotations

import concurrent.futures
import math
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from mpidl.errors import UserError

MPIRUN = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")
COUNT_FLAGS = ("-n", "-np", "--n", "--np", "--ntasks")
HOST_FLAGS = ("-host", "-hosts", "--host", "--hosts", "-H", "-w", "--nodelist")
HOST_FILE_FLAGS = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
NODE_FLAGS = ("-N", "--nodes", "--ntasks-per-node")  # srun options that may not suit fewer hosts
PROBE_SECONDS = 30  # time limit for starting a program on a host
MAX_PROBES = 16  # largest number of hosts that are tested at the same time


@dataclass(frozen=True)
class JobCommand:
    """A command line that starts a training run.

    Attributes
    ----------
    start : tuple of str
        The words before the training options.
    options : tuple of str
        The training options, as words.
    hosts : dict
        {host: number of ranks that fit on the host, or 0 if unknown}. Empty if the job runs only on
        this host.
    """

    start: tuple[str, ...]
    options: tuple[str, ...]
    hosts: dict[str, int]

    @staticmethod
    def parse(words: Sequence[str]) -> JobCommand:
        """Divide a command line into its parts, and find its hosts.

        Raises
        ------
        UserError
            If the command does not start a training run, or if its hostfile cannot be read.
        """
        for i, word in enumerate(words):
            is_module = word == "mpidl.train" and words[i - 1 : i] == ["-m"]
            is_command = word == "train" and os.path.basename(words[i - 1]) == "mpidl" and i > 0
            if is_module or is_command or word.endswith("run/train"):
                command = JobCommand(tuple(words[: i + 1]), tuple(words[i + 1 :]), {})
                return JobCommand(command.start, command.options, command._find_hosts())
        raise UserError(
            "launch: expected a training command after --, such as mpirun -n 4 python -m "
            f"mpidl.train, found {' '.join(words) or 'nothing'}"
        )

    @property
    def launcher(self) -> str:
        """The word that names mpirun or srun, or ""."""
        names = (*MPIRUN, "srun")
        return next((word for word in self.start if os.path.basename(word) in names), "")

    @property
    def uses_srun(self) -> bool:
        return os.path.basename(self.launcher) == "srun"

    @property
    def ranks(self) -> int | None:
        """The number of ranks; None if neither the command nor Slurm specifies it."""
        texts = [*self._values(COUNT_FLAGS), os.environ.get("SLURM_NTASKS", "")]
        return next((int(text) for text in texts if text.isdigit()), None)

    def _find_hosts(self):
        if not self.launcher:
            return {}
        files = self._values(HOST_FILE_FLAGS)
        if files and not self.uses_srun:
            return _hosts_of_file(files[-1])
        names = self._values(HOST_FLAGS)
        if names and not self.uses_srun:
            return dict(_host_of(entry) for entry in names[-1].split(",") if entry)
        return _hosts_of_slurm(names[-1] if names else os.environ.get("SLURM_JOB_NODELIST"))

    def _values(self, flags):
        """Return the values of the given launcher flags, in order."""
        values, words = [], self._behind_launcher()
        for word, following in zip(words, (*words[1:], ""), strict=True):
            flag, equals, value = word.partition("=")
            if flag in flags:
                values.append(value if equals else following)
            elif word[:2] in flags and word[2:].isdigit():  # -n4
                values.append(word[2:])
        return values

    def _behind_launcher(self):
        return self.start[self.start.index(self.launcher) + 1 :] if self.launcher else ()

    def without_hosts(self, lost: set[str]) -> JobCommand:
        """Return the command for the remaining hosts, with as many ranks as fit on these hosts.

        Parameters
        ----------
        lost : set of str
            The hosts to leave out. At least one host must remain.
        """
        hosts = {host: room for host, room in self.hosts.items() if host not in lost}
        words, skip = [], False
        flags = (*COUNT_FLAGS, *HOST_FLAGS, *HOST_FILE_FLAGS, *(NODE_FLAGS * self.uses_srun))
        for word in self._behind_launcher():
            if skip:
                skip = False
            elif word.partition("=")[0] in flags:
                skip = "=" not in word
            elif not (word[:2] in flags and word[2:].isdigit()):
                words.append(word)
        count = _ranks_on(hosts, self.ranks, len(self.hosts))
        if self.uses_srun:
            added = [f"--ntasks={count}", f"--nodes={len(hosts)}", f"--nodelist={','.join(hosts)}"]
        else:
            places = [f"{host}:{room}" if room else host for host, room in hosts.items()]
            added = [self._host_flag(), ",".join(places), "-n", str(count)]
        launcher = self.start[: self.start.index(self.launcher) + 1]
        return JobCommand((*launcher, *added, *words), self.options, hosts)

    def lost_hosts(self, environment: dict[str, str]) -> set[str]:
        """Return the hosts on which the launcher cannot start a program."""
        if len(self.hosts) < 2:
            return set()
        flags = ["--overlap", "-N1", "--nodelist"] if self.uses_srun else [self._host_flag()]

        def is_lost(host):
            words = [self.launcher, *flags, host, "-n", "1", "true"]
            try:
                result = subprocess.run(
                    words,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=PROBE_SECONDS,
                )
                return result.returncode != 0
            except subprocess.TimeoutExpired:
                return True

        with concurrent.futures.ThreadPoolExecutor(MAX_PROBES) as pool:
            answers = pool.map(is_lost, self.hosts)
            return {host for host, lost in zip(self.hosts, answers, strict=True) if lost}

    def _host_flag(self):
        """Return the flag with which this mpirun accepts host names: MPICH's or Open MPI's."""
        try:
            text = subprocess.run(
                [self.launcher, "--version"], capture_output=True, text=True, timeout=PROBE_SECONDS
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
        return "-hosts" if "HYDRA" in text else "--host"


def _ranks_on(hosts, ranks, host_count):
    """Return how many ranks fit on `hosts`, at most `ranks`.

    If the number for a host is unknown, assume that `ranks` ranks were placed evenly on
    `host_count` hosts.
    """
    room = sum(hosts.values())
    if not all(hosts.values()):
        room = len(hosts) * math.ceil((ranks or host_count) / host_count)
    return min(ranks, room) if ranks else room


def _host_of(entry):
    name, _, room = entry.strip().partition(":")
    return name, int(room) if room.isdigit() else 0


def _hosts_of_file(path):
    """Read a hostfile, with lines such as "n1", "n1:4" (MPICH) or "n1 slots=4" (Open MPI)."""
    try:
        with open(path) as file:
            lines = [line.partition("#")[0].split() for line in file]
    except OSError as error:
        raise UserError(f"{path}: the hostfile cannot be read: {error.strerror}") from error
    hosts: dict[str, int] = {}
    for name, *words in filter(None, lines):
        host, room = _host_of(name)
        slots = [word[6:] for word in words if re.fullmatch(r"slots=\d+", word)]
        hosts[host] = hosts.get(host, 0) + (int(slots[0]) if slots else room)
    return hosts


def _hosts_of_slurm(nodes):
    """Return {host: number of ranks} for Slurm's list of nodes, according to the allocation."""
    if not nodes:
        return {}
    try:
        words = ["scontrol", "show", "hostnames", nodes]
        names = subprocess.run(words, capture_output=True, text=True, timeout=PROBE_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    room = os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return dict.fromkeys(names.split(), int(room) if room.isdigit() else 0)
