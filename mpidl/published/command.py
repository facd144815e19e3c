"""`mpidl fetch`: download published weights, on a machine with internet."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Sequence
from typing import Any

from mpidl.cli.parser import Parser
from mpidl.errors import Fault, UserError
from mpidl.files import reason
from mpidl.published import sources
from mpidl.published.catalog import CATALOG, WEIGHTS, published
from mpidl.ranks import failure
from mpidl.text import aligned, printable


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.fetch; `arguments.train` describes parameters and errors."""
    parser = Parser(
        "mpidl.fetch",
        "Download weights of networks that were trained on ImageNet from the Hugging Face hub.\n"
        "dl.pretrained and mpidl train --weights published use them. Run the command on a machine\n"
        "with internet access, such as a login node.",
        quiet,
        epilog="exit codes: 0 success; 1 the download failed; 2 invalid options",
    )
    parser.add_argument(
        "networks",
        metavar="NAME",
        nargs="*",
        help=f"One or more of these networks: {', '.join(CATALOG)}",
    )
    parser.text(
        "--folder",
        "DIR",
        "Write the weights to DIR/NAME.safetensors, with the names of the classes, to copy them to "
        f"another machine, where the environment variable {sources.FOLDER} names the folder; "
        "default: write to the cache of the hub",
    )
    parser.switch(
        "--list", "List the networks, their repositories, and the place of weights on this machine"
    )
    parsed = parser.parse(argv)
    if not parsed.list and not parsed.networks:
        raise UserError("fetch: expected the name of a network, or --list, found none")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError("fetch uses one process: run it without mpirun")
    if parsed.list:
        head = ("network", "repository", "licence", "on this machine")
        rows = [
            (name, repository, CATALOG[name].licence, origin or "no")
            for name, repository, origin in sources.listed()
        ]
        print("\n".join(aligned([head, *rows], left=4)))
        return 0
    for name in parsed.networks:
        published(name)
    if parsed.folder is not None:  # before a long download
        _make_folder(parsed.folder)
    hub: Any = sources.hub()
    for name in parsed.networks:
        path = _download(hub, published(name).repository, WEIGHTS, "model")
        print(f"{name}: {_copied(path, parsed.folder, f'{name}.safetensors')}")
    repository, file = sources.LABELS
    path = _download(hub, repository, file, "dataset")
    print(f"class names: {_copied(path, parsed.folder, sources.CLASS_FILE)}")
    return 0


def _download(hub, repository, file, kind):
    """Download a file into the cache of the hub, and return its path."""
    try:
        return hub.hf_hub_download(repository, file, repo_type=kind)
    except Exception as error:  # the library raises errors of many packages
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Fault(
            f"{repository}: {file} cannot be downloaded: {text:.300}; fetch needs internet, or "
            "HF_ENDPOINT with the address of a mirror"
        ) from error


def _make_folder(folder):
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--folder {printable(folder)}: cannot be created: {reason(error)}"
        ) from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--folder {printable(folder)}: cannot be written: no permission")


def _copied(path, folder, name):
    """Copy a file to a folder, if there is one, and return the path of the file to use."""
    if folder is None:
        return printable(path)
    target = os.path.join(folder, name)
    part = f"{target}.part"
    try:
        shutil.copyfile(path, part)
        os.replace(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise UserError(f"{printable(target)}: cannot be written: {reason(error)}") from error
    return printable(target)
