"""Recognize and check the URLs of objects in a store; the options of access to object stores.

A path with a protocol, such as s3://bucket/prefix, is *remote*. The wing `data.storage` reads it.
"""

import os
import re

from mpidl.errors import UserError
from mpidl.options.declaration import at_least, option, options_class, positive, text_or_none
from mpidl.text import printable

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.S)
HOST = re.compile(r"[^:]*(:\d*)?|\[[0-9A-Fa-f:.]+\](:\d*)?|arn:.*")  # with an optional port


@options_class(group="Object stores")
class Settings:
    """The options of the commands, and the settings of this process, for object stores."""

    endpoint_url: str | None = option(
        text_or_none("URL"),
        "S3-compatible store for s3:// data",
        default=None,
        default_help="AWS_ENDPOINT_URL, else Amazon S3",
    )
    requests: int = option(
        at_least(1), "Simultaneous requests to an object store per node", default=32
    )
    cache_dir: str | None = option(
        text_or_none("DIR"),
        "Local folder that caches objects for later epochs and runs",
        default=None,
    )
    retry_seconds: float = option(
        positive(),
        "Seconds for which a request is retried if an object store is busy or does not answer",
        default=120.0,
        default_help="120",
    )


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL with a protocol, such as s3://bucket/prefix."""
    return URL.match(os.fspath(path)) is not None


def check_url(url: str, option: str) -> None:
    """Raise UserError if a URL contains credentials, or if it consists only of a protocol.

    The message does not repeat credentials. Local paths are accepted. `option` named the URL.
    """
    match = URL.match(url)
    if match is None:
        return
    protocol, host, rest = match.groups()
    advice = "credentials come from the environment or a profile"
    # Passwords may contain slashes, as AWS secrets do.
    if "@" in host or ("@" in rest and not HOST.fullmatch(host)):
        name = printable((host + rest).rpartition("@")[2].partition("?")[0])
        raise UserError(
            f"{option} {protocol}://{name}: expected a URL without user name and password: {advice}"
        )
    if protocol in ("http", "https") and "?" in rest:
        name = printable(host + rest.partition("?")[0])
        raise UserError(f"{option} {protocol}://{name}: expected a URL without a query: {advice}")
    if not (host + rest).strip("/"):
        raise UserError(f"{option} {printable(url)}: expected a URL such as s3://bucket/prefix")


def refuse_remote(path: str | None, option: str, kind: str) -> None:
    """Raise UserError if a path for results is remote.

    `kind` is "a folder" or "a file", for the message.
    """
    if path is not None and is_remote(path):
        check_url(path, option)
        raise UserError(
            f"{option} {printable(path)}: expected {kind} on a file system; results are not "
            "written to object stores (train --upload copies the finished model)"
        )
