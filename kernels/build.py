"""Compiles kernels/cpu into one shared library for each build: `python kernels/build.py`."""

import argparse
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
FLAGS = "-std=gnu11 -O3 -fPIC -shared -pthread -ffp-contract=off -fno-math-errno -Wall -Wextra"
BUILDS = {
    "x86-64-v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "x86-64-v3": ["-march=x86-64-v3"],
    "generic": [],
}


def sources():
    folder = os.path.join(HERE, "cpu")
    return sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.endswith(".c"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("builds", nargs="*", default=list(BUILDS))
    parser.add_argument("--cc", default=os.environ.get("CC", "cc"))
    parser.add_argument("--flags", default="")
    given = parser.parse_args()
    os.makedirs(os.path.join(HERE, "lib"), exist_ok=True)
    for build in given.builds:
        out = os.path.join(HERE, "lib", f"libmpidl-{build}.so")
        command = [given.cc, *FLAGS.split(), *BUILDS[build], *given.flags.split()]
        subprocess.run([*command, *sources(), "-lm", "-o", out + ".new"], check=True)
        os.replace(out + ".new", out)


if __name__ == "__main__":
    sys.exit(main())
