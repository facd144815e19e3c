"""Recognize and check URLs, and hold the settings for access to object stores."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from mpidl.errors import UserError
from mpidl.text import printable

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)(.*)", re.S)
HOST = re.compile(r"[^:]*(:\d*)?|\[[0-9A-Fa-f:.]+\](:\d*)?|arn:.*")  # perhaps with a port
REQUESTS = 32  # default number of requests at a time per node
RETRY_SECONDS = 120.0


class Settings(NamedTuple):
    """Settings of this process for access to object stores.

    Attributes
    ----------
    endpoint_url : str or None
        URL of an S3-compatible store; None for the URL in the environment, else Amazon's.
    requests : int
        Number of requests that this rank sends at a time.
    cache_dir : str or None
        Local folder that keeps the bytes of objects.
    retry_seconds : float
        Seconds for which a failing request is repeated.
    """

    endpoint_url: str | None = None
    requests: int = REQUESTS
    cache_dir: str | None = None
    retry_seconds: float = RETRY_SECONDS


_settings = Settings()


def current() -> Settings:
    """Return the settings of this process."""
    return _settings


def configure(
    world: Any = None,
    *,
    endpoint_url: str | None = None,
    requests: int = REQUESTS,
    cache_dir: str | os.PathLike[str] | None = None,
    retry_seconds: float = RETRY_SECONDS,
) -> None:
    """Set how this process accesses object stores. Call it before data are opened.

    Credentials are not settings: they come from the environment or the profile of each rank, as
    the library of the store finds them.

    Parameters
    ----------
    world : World, optional
        The ranks, which divide the requests of their node; by default this rank alone.
    endpoint_url : str, optional
        URL of an S3-compatible store, by default that of the environment variable
        AWS_ENDPOINT_URL, else Amazon's.
    requests : int
        Largest number of requests per node at a time. Each rank sends at least one.
    cache_dir : path-like, optional
        Folder on a local disk that keeps the bytes of objects. The ranks of a node share it, and
        later runs read from it. It is made if it does not exist.
    retry_seconds : float
        Seconds for which a request is repeated if the store is busy or does not answer.

    Raises
    ------
    UserError
        If a value is invalid, or the folder cannot be made or written to.
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
                f"--cache-dir {printable(cache_dir)}: cannot be made: {error.strerror or error}"
            ) from None
        if not os.access(cache_dir, os.W_OK | os.X_OK):
            raise UserError(f"--cache-dir {printable(cache_dir)}: cannot be written: no permission")
    ranks = 1 if world is None else world.hosts.count(world.host)
    _settings = Settings(endpoint_url, max(1, requests // ranks), cache_dir, retry_seconds)


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL with a protocol, such as s3://bucket/prefix."""
    return URL.match(os.fspath(path)) is not None


def check_url(url: str, option: str) -> None:
    """Raise UserError if a URL contains credentials or nothing but a protocol.

    The message does not repeat credentials.

    Parameters
    ----------
    url : str
        A URL, or any other path, which is accepted.
    option : str
        Command-line option that named the URL, for the message.
    """
    match = URL.match(url)
    if match is None:
        return
    protocol, host, rest = match.groups()
    advice = "credentials come from the environment or a profile"
    # Passwords may contain slashes; AWS secrets do.
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
        The path; None is accepted.
    option : str
        Command-line option that named it.
    kind : str
        "a folder" or "a file", for the message.
    """
    if path is not None and is_remote(path):
        check_url(path, option)
        raise UserError(
            f"{option} {printable(path)}: expected {kind} on a file system; results are not "
            "written to object stores (train --upload copies the finished model)"
        )
