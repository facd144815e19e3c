"""Run a real Slurm of three nodes on this machine, in separate namespaces.

The nodes have host names, and their network is the loopback interface of the namespaces. All files
are in one folder. No process outlives the cluster.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jobs
import launcher
from limits import wait_until

NODES = ("n1", "n2", "n3")
ADDRESS = "10.0.0.1"  # address inside the namespaces, which have no other network
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter", "mount", "hostname")
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
PMIX = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/pmix2/lib")
FINAL = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "TIMEOUT"}
FINAL |= {"OUT_OF_MEMORY", "PREEMPTED"}
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=login
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
KillWait=10
MinJobAge=600
SlurmdParameters=config_overrides
{parameters}
{nodes}
PartitionName=batch Nodes=n[1-3] Default=YES MaxTime=60 PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=n[1-3] MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=4 Sockets=1 CoresPerSocket=4 State=UNKNOWN"
)


def why_not():
    """Return why no cluster can be started here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)"
    if os.getuid() != 0:
        return "Slurm's daemons need root"
    words = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        return "this machine does not allow namespaces (unshare)"
    return None


def _child(pid):
    """Return the process id of the only child of a process, as text, or None."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return children[0] if children else None


class Cluster:
    """The daemons of the cluster. `with Cluster(folder) as cluster:` ends all daemons at its end.

    `folder` is an empty folder. Its path must be short, because the folder contains a socket.
    """

    def __init__(self, folder):
        self.folder, self.daemons, self.namespaces = folder, {}, {}
        self.environment = launcher.environment(jobs.without_plots())
        self.environment |= {"PATH": f"{self.environment['PATH']}{os.pathsep}/usr/sbin"}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self):
        lines = ["127.0.0.1 localhost", *(f"{ADDRESS} {name}" for name in ("login", *NODES))]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge.key").chmod(0o600)
        for name in ("state", *(f"{kind}-{n}" for kind in ("spool", "tmp") for n in NODES)):
            (self.folder / name).mkdir()
        mounts = [self.folder / "hosts", "/etc/hosts"]
        if PMIX.exists():
            # Slurm's plugin opens a library by a name that only the development package has.
            shutil.copytree(PMIX, self.folder / "pmix", symlinks=True)
            (self.folder / "pmix" / "libpmix.so").unlink(missing_ok=True)
            (self.folder / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")
            mounts += [self.folder / "pmix", PMIX]
        self.configure()
        words = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--kill-child"]
        words += ["--mount-proc", sys.executable, Path(__file__).with_name("machine.py")]
        # The kernel ends the namespaces together with this thread, even if this process is killed.
        self.machine = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *words, ADDRESS, *mounts],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            if self.machine.stdout.readline() != "ready\n":
                raise RuntimeError("the namespaces could not be prepared")
            self.pid = _child(self.machine.pid)
            self._start_daemons()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception):
        self.close()

    def close(self):
        """End every process of the namespaces, and wait for the daemons."""
        self.machine.kill()
        self.machine.wait()
        for daemon in self.daemons.values():
            daemon.wait()

    def configure(self, parameters="SlurmctldParameters=preempt_send_user_signal"):
        """Write slurm.conf with a line of parameters; a running controller reads the new file."""
        nodes = [NODE.format(name=name, port=17001 + i) for i, name in enumerate(NODES)]
        text = CONFIGURATION.format(
            folder=self.folder, parameters=parameters, nodes="\n".join(nodes)
        )
        (self.folder / "slurm.conf").write_text(text)
        if self.daemons:
            self.run("scontrol", "reconfigure")

    def _start_daemons(self):
        munge = ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket"]
        munge += [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "seed")]
        self._start("munged", *munge, f"--log-file={self.folder}/munge.log")
        wait_until((self.folder / "munge.socket").exists)
        self.start_controller()
        for name in NODES:
            self.start_node(name)
        wait_until(self.is_idle, 0.2)

    def stop_controller(self):
        """End slurmctld, as a restart of its machine would.

        Slurm saves the state of jobs seconds after a change. A killed controller would forget that
        a job has started, and start it a second time.
        """
        os.kill(int(_child(self.daemons["slurmctld"].pid)), signal.SIGTERM)
        self.daemons["slurmctld"].wait()

    def start_controller(self):
        self._start("slurmctld", "slurmctld", "-D")
        wait_until(lambda: "is UP" in self.finish("scontrol", "ping").stdout, 0.2)

    def start_node(self, name):
        """Start the daemon of a node, with the node's host name and shared memory."""
        # MPICH names its shared memory after the job number, and other clusters use the same
        # numbers.
        script = f"mount -t tmpfs shm /dev/shm && hostname {name} && exec slurmd -D -N {name}"
        self._start(name, "unshare", "--uts", "--mount", "sh", "-c", script)
        wait_until(lambda: self._has_own_name(name))

    def _has_own_name(self, name):
        """Return whether a node's daemon has a separate UTS namespace, and store the namespace."""
        pid = _child(self.daemons[name].pid)
        if pid is None:
            return False
        self.namespaces[name] = os.readlink(f"/proc/{pid}/ns/uts")
        return self.namespaces[name] != os.readlink(f"/proc/{self.pid}/ns/uts")

    def _start(self, name, *words):
        with open(self.folder / f"{name}.out", "a") as log:
            self.daemons[name] = subprocess.Popen(
                self._inside(*words), stdout=log, stderr=log, env=self.environment
            )

    def _inside(self, *words, cwd=None):
        enter = ["nsenter", "--target", self.pid, "--mount", "--uts", "--net", "--pid"]
        return [*enter, f"--wd={cwd or Path.cwd()}", *map(str, words)]

    def is_idle(self):
        """Return whether all nodes can take jobs."""
        result = self.finish("sinfo", "--noheader", "--partition=batch", "--format=%D %T")
        return result.stdout.split() == [str(len(NODES)), "idle"]

    def start(self, *words, env=None, cwd=None):
        """Start a command on the login node and return the launcher's Job."""
        return launcher.Job(
            self._inside(*words, cwd=cwd),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | {name: str(value) for name, value in (env or {}).items()},
        )

    def finish(self, *words, **keywords):
        """Run a command on the login node and return its launcher.Result."""
        with self.start(*words, **keywords) as job:
            stdout, stderr = job.communicate()
        return launcher.Result(job.returncode, stdout, stderr)

    def run(self, *words, **keywords):
        """Run a command on the login node, check that it succeeds, and return its output."""
        result = self.finish(*words, **keywords)
        assert result.returncode == 0, launcher.format_output(words, result.stdout, result.stderr)
        return result.stdout

    def submit(self, folder, *words, env=None):
        """Submit `sbatch WORDS...` from a folder and return the Job."""
        words = ["sbatch", "--parsable", *words]
        return Job(self, int(self.run(*words, env=env, cwd=folder)), folder)

    def pids(self, node):
        """Return the processes of a node, which share its host name: daemon, steps and tasks."""
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns" / "uts") == self.namespaces[node]:
                    pids.append(int(process.name))
        return pids

    def kill_node(self, node):
        """Kill all processes of a node, as a power failure would."""
        while pids := self.pids(node):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self.daemons[node].wait()


class Job:
    """A submitted job. `number` is the job's number, or ARRAY_TASK for a task of an array."""

    def __init__(self, cluster, number, folder):
        self.cluster, self.number, self.folder = cluster, number, folder

    def facts(self):
        """Return {name: text} of what `scontrol show job` prints."""
        text = self.cluster.run("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def state(self):
        return self.facts()["JobState"]

    def log(self):
        """Return the output of the job."""
        path = Path(self.facts()["StdOut"])
        return path.read_text() if path.exists() else ""

    def wait(self, state):
        """Wait until the job has a state. Any other final state or a requeue is an error."""
        facts = self.facts()
        restarts = facts["Restarts"]

        def is_over():
            nonlocal facts
            before, facts = facts, self.facts()
            is_back = facts["JobState"] == "PENDING" and facts["Restarts"] != restarts
            is_end = is_back or facts["JobState"] in FINAL | {state}
            return is_end and facts["JobState"] == before["JobState"]  # no transition

        wait_until(is_over, 0.2)
        text = f"{facts['JobState']}, expected {state}; exit code {facts['ExitCode']}"
        assert facts["JobState"] == state, f"{text}\n{self.log()}"

    def wait_for_requeue(self, count=1):
        """Wait until the job is in the queue again, and let it start immediately."""
        self.wait("PENDING")
        # a restarted controller reports the state before it counts the restart
        wait_until(lambda: self.facts()["Restarts"] == str(count), 0.2)
        time.sleep(2)  # a node rejects credentials from the second of an earlier revocation
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def scancel(self, *options):
        self.cluster.run("scancel", *options, self.number)

    def task(self, index):
        """Return a task of this array."""
        return Job(self.cluster, f"{self.number}_{index}", self.folder)
