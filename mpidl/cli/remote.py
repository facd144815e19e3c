"""Object stores in the commands: check URLs, apply the settings, upload the results."""

import functools
import os
from collections.abc import Mapping
from typing import Any

from mpidl.cli.arguments import STORAGE
from mpidl.data.urls import Settings, check_url, is_remote
from mpidl.errors import StorageFault, UserError
from mpidl.files import call_together, on_rank_0
from mpidl.ranks.world import World
from mpidl.report import run_files
from mpidl.text import printable
from mpidl.training.options.training_options import flag

DATA = ("data", "test_data", "validation_data", "weights", "upload")
UPLOADED = ("model.h5", run_files.SUMMARY, run_files.OPTIONS)


def configure(options: Mapping[str, Any], world: World | None = None) -> None:
    """Apply the settings for object stores, and check the URLs of a command. Collective.

    Parameters
    ----------
    options : mapping
        Options by name. Those in `STORAGE` and `DATA` are used; each may be missing.
    world : World, optional
        The ranks; by default, only this rank.

    Raises
    ------
    UserError
        If a URL contains credentials, --upload names no object store, or a setting is invalid.
    """
    for name in DATA:
        check_url(options.get(name) or "", flag(name))
    values = {name: options[name] for name in STORAGE if name in options}
    target = options.get("upload")
    if target is not None and not is_remote(target):
        raise UserError(
            f"--upload {printable(target)}: expected a URL such as s3://bucket/prefix, found a path"
        )
    is_default = all(value == getattr(Settings, name) for name, value in values.items())
    if is_default and not any(is_remote(options.get(name) or "") for name in DATA):
        return
    from mpidl.data.storage import settings

    if world is None:
        settings.configure_storage(**values)
    else:  # a folder may be missing on one node only
        call_together(world, lambda: settings.configure_storage(world, **values))
    if target is not None:
        on_rank_0(world, functools.partial(_check_packages, target))


def _check_packages(url: str) -> None:
    """Raise UserError if a package for the store of a URL is missing."""
    from mpidl.data.storage import store

    store.store_of(url)


def upload(folder: str, target: str) -> None:
    """Copy the files in `UPLOADED` from the folder of a run to a prefix of an object store.

    Raises
    ------
    StorageFault
        If a file cannot be copied.
    """
    from mpidl.data.storage.store import store_of

    for name in UPLOADED:
        with open(os.path.join(folder, name), "rb") as file:
            content = file.read()
        try:
            store_of(target).write(f"{target.rstrip('/')}/{name}", content)
        except (UserError, StorageFault) as error:
            raise StorageFault(
                f"--upload: {error}; the results are in {printable(folder)}"
            ) from None
