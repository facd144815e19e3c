"""Check a certified run, and replay parts of it: `mpirun -n 2 python -m mpidl.audit RUN`."""

from mpidl_command import run

if __name__ == "__main__":
    run("audit")
