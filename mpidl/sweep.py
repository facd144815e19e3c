"""Train many models at once: `mpirun -n 8 python -m mpidl.sweep FILE.toml` (see --help)."""

from mpidl_command import run

if __name__ == "__main__":
    run("sweep")
