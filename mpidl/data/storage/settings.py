"""Recognize and check URLs, and store the settings for access to object stores."""

import os
import re
from typing import Any

from mpidl.errors import UserError
from mpidl.options.declaration import (
    at_least,
    check_value,
    declared,
    option,
    options_class,
    positive,
    rule_of,
    text_or_none,
)
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


_settings = Settings()


def current() -> Settings:
    """Return the settings of this process."""
    return _settings


def configure_storage(
    world: Any = None,
    *,
    endpoint_url: str | None = None,
    requests: int = Settings.requests,
    cache_dir: str | os.PathLike[str] | None = None,
    retry_seconds: float = Settings.retry_seconds,
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
    rules = {name: rule_of(option) for name, option in declared(Settings).items()}
    check_value(rules["requests"], requests, "requests")
    check_value(rules["retry_seconds"], retry_seconds, "retry_seconds")
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
    _settings = Settings(
        endpoint_url=endpoint_url,
        requests=max(1, requests // ranks),
        cache_dir=cache_dir,
        retry_seconds=retry_seconds,
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
