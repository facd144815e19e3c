"""Submit trainings with run/train.slurm, control their speed, and create environments."""

import shutil
import sys
import sysconfig
from pathlib import Path

import jobs
import launcher
from limits import wait_until
from mpi4py import MPI

NETWORK = f"{Path(__file__).with_name('paced.py')}:paced"
LENGTH = ("--epochs", 30)  # 120 iterations
MPI_TYPE = "pmi2" if MPI.get_vendor()[0] == "MPICH" else "pmix"


class Training:
    """A job that trains, with the folder of its results.

    The steps are slow until `release` is called.
    """

    def __init__(self, job, out, pace):
        self.job, self.out, self.pace = job, out, pace

    def wait_for_steps(self, count=3):
        """Wait until the training is in progress."""

        def is_training():
            assert self.job.state() in ("PENDING", "CONFIGURING", "RUNNING"), self.job.log()
            path = self.out / "metrics.jsonl"
            return path.exists() and path.read_text().count('"learning_rate"') >= count

        wait_until(is_training, 0.2)

    def release(self):
        """Remove the delay of the steps."""
        self.pace.unlink(missing_ok=True)

    def finish(self):
        """Wait for the end of the training and return the hash of the weights."""
        self.release()
        self.job.wait("COMPLETED")
        return jobs.weights_hash(self.out)


def start(cluster, folder, name, words, out, options=(), nodes=2, tasks=2, checkout=launcher.ROOT):
    """Submit run/NAME.slurm with the arguments `words`, and return the Training in `out`.

    `options` are for sbatch, and `checkout` is the folder that contains run/.
    """
    pace, venv = folder / "pace", folder / "venv"
    pace.touch()
    if not venv.exists():
        make_environment(venv, checkout)
    size = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    words = [*size, *options, checkout / "run" / f"{name}.slurm", *words]
    env = {"MPIDL_VENV": venv, "PACE_FILE": pace}
    return Training(cluster.submit(folder, *words, env=env), out, pace)


def train_words(shapes, out, *words):
    """Return mpidl.train's arguments for the usual training; a test may append arguments."""
    usual = [*LENGTH, "--batch-size", 50, "--network", NETWORK, "--data", shapes, "--out", out]
    return [*usual, *words]


def make_environment(folder, checkout):
    """Create a checkout's environment as run/install does, with this environment's packages."""
    prefix, packages = Path(sys.prefix), Path(sysconfig.get_path("purelib"))
    own_packages = folder / packages.relative_to(prefix)
    own_packages.mkdir(parents=True)
    for path in [prefix / "bin", prefix / "pyvenv.cfg", *(prefix / "lib").iterdir()]:
        if not (folder / path.relative_to(prefix)).exists():
            (folder / path.relative_to(prefix)).symlink_to(path)
    (own_packages / "packages.pth").write_text(f"{packages}\n")
    (own_packages / "mpidl-checkout.pth").write_text(f"{checkout}\n")
    (folder / "mpidl-mpi").write_text("mpich\n" if MPI_TYPE == "pmi2" else "openmpi\n")


def changed_checkout(folder, name, text, replacement):
    """Copy the job scripts, replace a text in one of them, and return the new checkout."""
    checkout = folder / "checkout"
    shutil.copytree(launcher.ROOT / "run", checkout / "run")
    path = checkout / "run" / name
    source = path.read_text()
    assert text in source
    path.write_text(source.replace(text, replacement))
    return checkout
