"""Recognize and check URLs, and store the settings for access to object stores."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from mpidl.errors import UserError
from mpidl.text import printable

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.S)
HOST = re.compile(r"[^:]*(:\d*)?|\[[0-9A-Fa-f:.]+\](:\d*)?|arn:.*")  # with an optional port
REQUESTS = 32  # default number of concurrent requests per node
RETRY_SECONDS = 120.0


class Settings(NamedTuple):
    """Settings of this process for access to object stores.

    Attributes
    ----------
    endpoint_url : str or None
        URL of an S3-compatible store. With None, the environment variable AWS_ENDPOINT_URL applies,
        or Amazon's URL if it is not set.
    requests : int
        Maximum number of concurrent requests of this rank.
    cache_dir : str or None
        Local folder that caches the bytes of objects. None for no cache.
    retry_seconds : float
        Time in seconds for which a failing request is repeated.
    """

    endpoint_url: str | None = None
    requests: int = REQUESTS
    cache_dir: str | None = None
    retry_seconds: float = RETRY_SECONDS


_settings = Settings()


def current() -> Settings:
    """Return the settings of this process."""
    return _settings


def configure_storage(
    world: Any = None,
    *,
    endpoint_url: str | None = None,
    requests: int = REQUESTS,
    cache_dir: str | os.PathLike[str] | None = None,
    retry_seconds: float = RETRY_SECONDS,
) -> None:
    """Set how this process accesses object stores. Call this function before opening data.

    Credentials are not settings. The store's library finds them in the environment or the profile
    of each rank.

    Parameters
    ----------
    world : World, optional
        The ranks. The ranks of a node share `requests`. By default, there is only this rank.
    endpoint_url : str, optional
        URL of an S3-compatible store. The default is the environment variable AWS_ENDPOINT_URL, or
        Amazon's URL if it is not set.
    requests : int
        Maximum number of concurrent requests per node. Each rank sends at least one request.
    cache_dir : path-like, optional
        Folder on a local disk that caches the bytes of objects, for all ranks of the node and for
        later runs. The folder is created if it does not exist. By default, there is no cache.
    retry_seconds : float
        Time in seconds for which a request is repeated if the store is busy or does not answer.

    Raises
    ------
    UserError
        If a value is invalid, or if the folder cannot be created or written to.
    """
    global _settings
    if endpoint_url is not None:
        check_url(endpoint_url, "--endpoint-url")
        if not endpoint_url.startswith(("http://", "https://")):
            raise UserError(
                f"--endpoint-url {printable(endpoint_url)}: expected http://HOST or https://HOST"
            )
    if requests < 1:
        raise UserError(f"--requests must be at least 1, got {requests}")
    if not retry_seconds > 0:
        raise UserError(f"--retry-seconds must be above 0, got {retry_seconds}")
    if cache_dir is not None:
        if is_remote(cache_dir):
            check_url(os.fspath(cache_dir), "--cache-dir")
            raise UserError(f"--cache-dir {printable(cache_dir)}: expected a local folder")
        cache_dir = os.path.abspath(cache_dir)
        try:
            os.makedirs(cache_dir, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--cache-dir {printable(cache_dir)}: cannot be created: {error.strerror or error}"
            ) from None
        if not os.access(cache_dir, os.W_OK | os.X_OK):
            raise UserError(f"--cache-dir {printable(cache_dir)}: cannot be written: no permission")
    ranks = 1 if world is None else world.hosts.count(world.host)
    _settings = Settings(endpoint_url, max(1, requests // ranks), cache_dir, retry_seconds)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL with a protocol, such as s3://bucket/prefix."""
    return URL.match(os.fspath(path)) is not None


def check_url(url: str, option: str) -> None:
    """Raise UserError if a URL contains credentials, or if it consists only of a protocol.

    The message does not repeat credentials.

    Parameters
    ----------
    url : str
        The URL. Local paths are accepted.
    option : str
        Command-line option that named the URL, for the message.
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

    Parameters
    ----------
    path : str or None
        The path, or None.
    option : str
        Command-line option that named the path.
    kind : str
        "a folder" or "a file", for the message.
    """
    if path is not None and is_remote(path):
        check_url(path, option)
        raise UserError(
            f"{option} {printable(path)}: expected {kind} on a file system; results are not "
            "written to object stores (train --upload copies the finished model)"
        )
