"""Download published weights: `python -m mpidl.fetch resnet18` (see --help)."""

from mpidl_command import run

if __name__ == "__main__":
    run("fetch")
