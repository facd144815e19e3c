#!/usr/bin/env -S uv run
# /// script
# dependencies = ["nox >= 2025.2.9"]
# ///
"""Run the checks with nox; each session calls a program of this repository.

nox            # lint and tests
nox -s site wheel
"""

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "none"  # the programs create .venv themselves


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Run the linters and the type checker, which `run/test` has installed in .venv."""
    for command in (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]):
        session.run(f".venv/bin/{command[0]}", *command[1:], external=True)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """Test each guarantee once, on one, two and three ranks."""
    session.run("./run/test", *session.posargs, external=True)


@nox.session(python=False, default=False)
def site(session: nox.Session) -> None:
    """Build the documentation in build/site."""
    session.run("./run/site", external=True)


@nox.session(python=False, default=False)
def wheel(session: nox.Session) -> None:
    """Build the wheel in dist, and train with it."""
    session.run("./run/wheel", external=True)


if __name__ == "__main__":
    nox.main()
