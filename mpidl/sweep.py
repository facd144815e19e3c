"""Train many models at once: `mpirun -n 8 python -m mpidl.sweep FILE.toml` (see --help)."""

from mpidl.cli.sweep import main
from mpidl.ranks import failure

if __name__ == "__main__":
    failure.run(main)
