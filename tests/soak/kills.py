"""Kill trainings at random moments, and resume them on other numbers of ranks.

A chain is one run. Each start has a random number of ranks and a random fault:

    kill    SIGKILL of a rank, of mpirun, of its proxy, or of all processes at once
    stop    SIGSTOP of a rank, which the other ranks must name
    signal  USR1 or TERM, after which the run ends with a checkpoint
    full    a full disk, or a limit on file size, while the run writes

Before a fault, a rank may be stopped for a moment (`pause`). When the processes have ended, every
generation of the checkpoint must be complete, the newest checkpoint must not be older than before
the fault, and no process may remain. At the end of a chain, the weights must equal an uninterrupted
run's weights, and no temporary file may remain.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import jobs
import launcher
import limits

from mpidl.errors import UserError
from mpidl.training.files import checkpoint, model_file

from . import private
from .processes import Job, send

TIMEOUT = 6  # --timeout of the trainings
HANG_SECONDS = 30  # time after a fault in which all processes must end
STOP_SECONDS = TIMEOUT + 2 + 20  # 20 s more, because ranks may still be starting
RUN_SECONDS = 300  # limit of an undisturbed training
YOUNG_SECONDS = 2.0  # mpidl removes older segments of dead jobs
DISK_MEGABYTES = 8
FILE_BYTES = 8000  # limit on file size, less than a checkpoint
EPOCHS = 80  # of 4 iterations
ITERATIONS = 4 * EPOCHS
OPTIONS = ["--batch-size", 50, "--epochs", EPOCHS, "--checkpoint-every", 3, "--timeout", TIMEOUT]


def draw(numbers, ranks, is_last):
    """Return the plan of one start: number of ranks, fault and its moment."""
    kinds = {"none": 1} if is_last else {"kill": 85, "stop": 4, "signal": 6, "full": 5}
    kind = numbers.choices([*kinds], [*kinds.values()])[0]
    plan = {"ranks": numbers.choice([n for n in range(1, 5) if n != ranks]), "kind": kind}
    if kind == "none":
        return plan
    moment = numbers.choices(["start", "save", "end"], [70, 27, 3])[0]
    longest = {"start": numbers.choice([1.5, 5.0]), "save": 0.004, "end": 0.4}
    plan |= {"moment": moment, "seconds": numbers.uniform(0, longest[moment])}
    plan["rank"] = numbers.randrange(plan["ranks"])
    if kind == "kill":
        victims = {"rank": 6, "mpirun": 2, "proxy": 2, "all": 1}
        plan["victim"] = numbers.choices([*victims], [*victims.values()])[0]
        if numbers.random() < 0.15:
            plan["pause"] = numbers.uniform(0, TIMEOUT / 4)
    elif kind == "stop":
        plan["ranks"] = max(plan["ranks"], 2)  # another rank must name the stopped rank
    elif kind == "signal":
        plan["moment"], plan["seconds"] = "save", numbers.uniform(0, 1)
        plan["signal"] = numbers.choice(["SIGUSR1", "SIGTERM"])
    elif kind == "full":
        plan["moment"], plan["seconds"] = "save", numbers.uniform(0, 0.1)
        plan["by"] = numbers.choice(["disk", "limit"])
    return plan


def drawn_plans(seed, chain):
    """Yield the plans of a chain. The last plan lets the run end."""
    numbers = random.Random(f"{seed} {chain}")
    ranks, starts = 0, numbers.randrange(10, 25)
    for start in range(starts + 1):
        plan = draw(numbers, ranks, start == starts)
        ranks = plan["ranks"]
        yield plan


def logged_plans(path, chain):
    """Return {chain: plans} from a log, for one chain, or for all chains if `chain` is None.

    A start may end before its fault in one trial but not when it is replayed. Therefore, a start
    without a fault is appended.
    """
    plans = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "plan" in record and chain in (None, record["chain"]):
            plans.setdefault(record["chain"], []).append(record["plan"])
    for chain_plans in plans.values():
        if chain_plans[-1]["kind"] != "none":
            chain_plans.append({"ranks": 1, "kind": "none"})
    return plans


class Chain:
    """A run and the faults that are injected into it.

    The chain writes to `folder` and trains on the images `data`. `expected` is the hash of
    the final weights.
    """

    def __init__(self, folder, number, data, expected, is_private):
        self.number, self.data, self.expected = number, data, expected
        self.is_private = is_private
        self.folder, self.disk = folder / "work", folder / "disk"
        self.out = self.disk / "run"
        for path in (self.folder, self.out):
            shutil.rmtree(path, ignore_errors=True)
        self.folder.mkdir()
        self.iteration = -1  # iteration of the newest checkpoint
        self.problems = []

    def run(self, plan):
        """Start the training once, and return a record of the start."""
        if checkpoint.exists(self.out):
            # MPI starts before the time-out of the checkpoint is read.
            options = "--resume", self.out, "--timeout", TIMEOUT
            words = jobs.command("train", *options, network=None)
        else:
            words = jobs.command("train", *OPTIONS, "--overwrite", data=self.data, out=self.out)
        job = Job(
            launcher.command(plan["ranks"], *words), self.folder, f"{os.getpid()}-{self.number}"
        )
        outcome = {"fault": False}
        try:
            if plan["kind"] == "none":
                outcome["end"] = job.wait(RUN_SECONDS)
            else:
                outcome["fault"] = self._has_come(job, plan)
                if outcome["fault"]:
                    outcome |= self._disturb(job, plan)
                limit = STOP_SECONDS if plan["kind"] == "stop" else HANG_SECONDS
                limit *= limits.slowness()
                outcome["end"] = job.wait(limit if outcome["fault"] else RUN_SECONDS)
            if outcome["end"] is None:
                self.problems.append(f"hang: processes {job.members()} are left")
                (self.folder / "stacks").write_text(job.stacks())
        finally:
            job.kill()
            (self.disk / "ballast").unlink(missing_ok=True)
        outcome["code"] = job.process.returncode
        self._check_end(job, plan, outcome)
        self._check_files(job, outcome)
        return outcome

    def _has_come(self, job, plan):
        """Wait for the moment of a fault; return False if the job ends earlier."""
        part, model = self.out / f".{checkpoint.CURRENT}.part", self.out / "model.h5"

        def is_reached():
            if plan["moment"] == "save":
                return part.exists()
            if plan["moment"] == "end":
                return model.exists() and model.stat().st_mtime > job.start_time
            return True

        while not is_reached():
            if job.has_ended():
                return False
            time.sleep(0.0002)
        time.sleep(plan["seconds"])
        return not job.has_ended()

    def _disturb(self, job, plan):
        """Inject the fault of the plan; return facts about it."""
        if "pause" in plan:
            pids = job.victims("rank", plan["rank"])
            send(pids, signal.SIGSTOP)
            time.sleep(plan["pause"])
            send(pids, signal.SIGCONT)
        facts = {"iteration": self._check_generations()}
        self.iteration = max(self.iteration, facts["iteration"])
        if plan["kind"] == "kill":
            facts["pids"] = job.victims(plan["victim"], plan["rank"])
            send(facts["pids"], signal.SIGKILL)
        elif plan["kind"] == "stop":
            facts["pids"] = [pid for pid, rank in job.members().items() if rank == plan["rank"]]
            send(facts["pids"], signal.SIGSTOP)
        elif plan["kind"] == "signal":
            facts["pids"] = job.victims("rank", plan["rank"])
            send(facts["pids"], signal.Signals[plan["signal"]])
        elif plan["by"] == "disk" and self.is_private:
            with contextlib.suppress(OSError), open(self.disk / "ballast", "wb", 0) as file:
                while True:
                    file.write(bytes(1 << 16))
        else:
            for pid, rank in job.members().items():
                if rank is not None:
                    with contextlib.suppress(OSError):
                        bounds = FILE_BYTES, resource.RLIM_INFINITY
                        resource.prlimit(pid, resource.RLIMIT_FSIZE, bounds)
        return facts

    def _check_generations(self):
        """Return the newest checkpoint's iteration, or -1 if there is none; report torn files."""
        iteration = -1
        for name in (checkpoint.PREVIOUS, checkpoint.CURRENT):
            try:
                _, attributes = model_file.read(str(self.out / name))
                iteration = json.loads(attributes["facts"])["position"]["iteration"]
            except model_file.Torn as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    self.problems.append(f"torn: {name}: {error}")
        return iteration

    def _check_end(self, job, plan, outcome):
        """Check the exit code and messages."""
        code, stderr = outcome["code"], job.stderr()
        if "Traceback" in stderr:
            self.problems.append("a traceback")
        if not outcome["fault"]:
            if code:
                self.problems.append(f"exit code {code} without a fault")
        elif plan["kind"] == "signal" and code not in (0, jobs.STOPPED):
            self.problems.append(f"exit code {code} after {plan['signal']}")
        elif plan["kind"] == "full" and code not in (0, 1, 2):
            self.problems.append(f"exit code {code} with a full disk")
        elif plan["kind"] == "stop" and code and outcome["pids"]:
            pid = outcome["pids"][0]
            if f"process {pid}" not in stderr or "stopped" not in stderr:
                self.problems.append(f"the stopped process {pid} is not named")

    def _check_files(self, job, outcome):
        """Check the checkpoint, and that no old shared memory remains."""
        iteration = self._check_generations()
        if checkpoint.exists(self.out):
            try:
                facts = checkpoint.load(self.out, warn=lambda line: None)[1]
                iteration = facts["position"]["iteration"]
            except UserError as error:
                self.problems.append(f"lost: {error}")
        if iteration < self.iteration:
            self.problems.append(f"lost: iteration {iteration} after {self.iteration}")
        outcome["checkpoint"] = self.iteration = iteration
        if self.is_private and iteration > outcome.get("iteration", iteration):
            for segment in os.scandir("/dev/shm"):
                if segment.stat().st_mtime < job.start_time - YOUNG_SECONDS:
                    self.problems.append(f"shared memory: {segment.name} is left")

    def check_result(self, names):
        """Compare the run with the uninterrupted run, whose files have these names."""
        if jobs.weights_hash(self.out) != self.expected:
            self.problems.append(f"other weights: {jobs.weights_hash(self.out)}")
        if jobs.iterations(self.out) != list(range(1, ITERATIONS + 1)):
            self.problems.append("metrics.jsonl: iterations are missing or repeated")
        if rest := {path.name for path in self.out.iterdir()} - names - {"hang-report.txt"}:
            self.problems.append(f"files are left: {', '.join(sorted(rest))}")
        if rest := {path.name for path in self.folder.iterdir()} - {"stdout", "stderr", "stacks"}:
            self.problems.append(f"temporary files are left: {', '.join(sorted(rest))}")


class Soak:
    """A sequence of chains, with a log and totals."""

    def __init__(self, options, folder, is_private):
        self.folder, self.is_private = folder, is_private
        self.log = open(options.log, "w")
        self.kills = self.starts = self.chains = 0
        self.problems, self.longest = [], 0.0
        self.start_time = time.monotonic()
        (folder / "disk").mkdir()
        if is_private:
            private.mount(folder / "disk", DISK_MEGABYTES)
            private.mount("/dev/shm", 512)
        self.data = jobs.draw_images(folder / "pictures")

    def write(self, **record):
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()

    def undisturbed(self):
        """Train on one rank without faults, and return the hash and the file names of the run."""
        chain = Chain(self.folder, -1, self.data, None, self.is_private)
        outcome = chain.run({"ranks": 1, "kind": "none"})
        if chain.problems or outcome["code"]:
            sys.exit(f"the undisturbed training failed: {chain.problems} {chain.folder}")
        self.expected = jobs.weights_hash(chain.out)
        self.names = {path.name for path in chain.out.iterdir()}
        self.write(expected=self.expected, seconds=outcome["end"])

    def run(self, number, plans):
        chain = Chain(self.folder, number, self.data, self.expected, self.is_private)
        start, outcome, ranks, kills = time.monotonic(), {}, [], 0
        for plan in plans:
            count = len(chain.problems)
            outcome = chain.run(plan)
            kills += bool(plan["kind"] == "kill" and outcome["fault"])
            ranks.append(plan["ranks"])
            if plan["kind"] == "kill" and outcome["fault"]:
                self.longest = max(self.longest, outcome["end"] or HANG_SECONDS)
            problems = chain.problems[count:]
            self.write(chain=number, plan=plan, outcome=outcome, problems=problems)
            if problems:
                self._keep(chain, len(ranks))
            if outcome["code"] == 0:
                break
        if outcome.get("code") != 0:
            chain.problems.append("the run has not ended")
        else:
            count = len(chain.problems)
            chain.check_result(self.names)
            if chain.problems[count:]:
                self._keep(chain, len(ranks))
        self.kills, self.starts, self.chains = (
            self.kills + kills,
            self.starts + len(ranks),
            self.chains + 1,
        )
        self.problems += [f"chain {number}: {problem}" for problem in chain.problems]
        self.write(chain=number, problems=chain.problems)
        state = "; ".join(chain.problems) or "the same weights"
        print(
            f"chain {number}: ranks {' '.join(map(str, ranks))}, {kills} SIGKILLs, "
            f"{time.monotonic() - start:.0f} s: {state}; so far {self.kills} SIGKILLs",
            flush=True,
        )

    def _keep(self, chain, start):
        """If a start has a problem, keep its files next to the log."""
        target = Path(f"{self.log.name}-chain-{chain.number}-start-{start}")
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(OSError):
            shutil.copytree(chain.folder, target / "work")
            shutil.copytree(chain.out, target / "run")

    def close(self):
        self.log.close()
        if self.is_private:
            private.unmount(self.folder / "disk")

    def report(self):
        """Print the totals and return the exit code."""
        seconds = time.monotonic() - self.start_time
        kinds = [problem.split(": ", 2)[1] for problem in self.problems]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("lost", "torn", "hang"))
        print(
            f"{self.kills} SIGKILLs in {self.starts} starts of {self.chains} runs, "
            f"{seconds:.0f} s: {counts}, {len(self.problems)} problems; the processes had ended "
            f"{self.longest:.1f} s after a SIGKILL at most"
        )
        for problem in self.problems:
            print(f"  {problem}")
        return 1 if self.problems else 0


def main(options):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also ends the current job
    is_private = private.enter()
    if not is_private:
        print("no mount namespace here: /dev/shm is not checked, and no disk is filled")
    with tempfile.TemporaryDirectory(prefix="mpidl-soak-") as folder:
        soak = Soak(options, Path(folder), is_private)
        try:
            soak.undisturbed()
            if options.replay:
                for number, plans in logged_plans(options.replay, options.chain).items():
                    soak.run(number, plans)
            elif options.chain is not None:
                soak.run(options.chain, drawn_plans(options.seed, options.chain))
            else:
                while soak.kills < options.kills:
                    soak.run(soak.chains, drawn_plans(options.seed, soak.chains))
        finally:
            soak.close()
        return soak.report()
