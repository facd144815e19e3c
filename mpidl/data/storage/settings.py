"""How this process accesses object stores."""

import math
import os
from dataclasses import dataclass
from typing import Any

from mpidl.data.urls import Settings, check_url, is_remote
from mpidl.errors import UserError
from mpidl.options.declaration import check_value, declared, rule_of
from mpidl.text import printable


@dataclass
class Access:
    """The settings of this process, and what it has noticed about its access."""

    settings: Settings = Settings()
    notice_time: float = -math.inf  # when a message last said that requests fail
    cache_is_full: bool = False  # whether a write to the cache has failed; no other follows


ACCESS = Access()


def current() -> Settings:
    """Return the settings of this process."""
    return ACCESS.settings


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
    ACCESS.settings = Settings(
        endpoint_url=endpoint_url,
        requests=max(1, requests // ranks),
        cache_dir=cache_dir,
        retry_seconds=retry_seconds,
    )
