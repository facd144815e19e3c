"""Access an object store through fsspec: list, read and write objects.

All requests run on fsspec's event loop in a separate thread. The thread starts at the first access.
After that, the process must not fork.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import datetime
import functools
import hashlib
import os
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import unquote

from mpidl.data.storage import settings
from mpidl.data.storage.presigned import BucketUrls
from mpidl.data.storage.retries import describe, refusal, retried
from mpidl.errors import UserError
from mpidl.files import Stamp, changed
from mpidl.text import pip_install, printable

T = TypeVar("T")
# {protocol: (package, extra of mpidl that installs it, or None)}
PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
    **dict.fromkeys(("http", "https"), ("aiohttp", "s3")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", None)),
    "abfs": ("adlfs", None),
}
HTTP = ("http", "https")
CONNECT_SECONDS, READ_SECONDS = 10, 30  # timeouts of one attempt
CANCEL_SECONDS = 1  # longest wait for cancelled requests when the process ends
# Metadata of an object that changes with its content, in order of preference.
VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "LastModified",
    "Last-Modified",
    "mtime",
    "created",
)


def store_of(url: str) -> Store:
    """Return the Store for a URL, with the current settings."""
    return _store(url.partition("://")[0], settings.current())


@functools.cache
def _store(protocol, configuration):
    return Store(protocol, configuration)


class Store:
    """An object store. Synchronous methods block until the store has answered.

    All requests raise UserError if the store refuses the request, and StorageFault if the store
    does not answer within `retry_seconds`. Messages name the URL.
    """

    def __init__(self, protocol: str, configuration: settings.Settings):
        self.protocol, self.configuration = protocol, configuration
        self.fs = _filesystem(protocol, configuration)
        self._urls: dict[str, BucketUrls] = {}  # {bucket: URLs of its objects}, for S3
        self._http = self.fs
        if protocol in ("s3", "s3a"):
            self._http = _filesystem("http", configuration)
        self._slots = asyncio.Semaphore(configuration.requests)
        self._requests: weakref.WeakSet[Coroutine[Any, Any, Any]] = weakref.WeakSet()
        atexit.register(self._cancel_requests)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the event loop and return its Future."""
        self._requests.add(work)
        return asyncio.run_coroutine_threadsafe(work, self.fs.loop)

    def _cancel_requests(self):
        """Cancel the requests in progress. Otherwise, asyncio warns about each request at exit."""

        async def cancel():
            # other programs in this process may use the loop, too
            tasks = [task for task in asyncio.all_tasks() if task.get_coro() in self._requests]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=CANCEL_SECONDS)

        if self.fs.loop.is_running():
            future = asyncio.run_coroutine_threadsafe(cancel(), self.fs.loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                future.result(2 * CANCEL_SECONDS)

    def wait_for_loop(self) -> None:
        """Wait until the event loop has finished its current work."""
        self.start(asyncio.sleep(0)).result()

    def stamp(self, url: str) -> Stamp | None:
        """Return the Stamp of an object, or None if the object does not exist."""
        return self.start(retried(url, lambda: self._stamp(url))).result()

    def listing(self, url: str) -> dict[str, Stamp]:
        """Return {relative path: Stamp} of all objects below a URL.

        If the URL names an object, the relative path of this object is "". If nothing exists at or
        below the URL, the dict is empty.
        """
        return self.start(retried(url, lambda: self._listing(url))).result()

    def write(self, url: str, content: bytes) -> None:
        """Write an object."""
        path = self.fs._strip_protocol(url)
        self.start(retried(url, lambda: self.fs._pipe_file(path, content))).result()

    async def read(self, url: str, expected: Stamp, start: int, stop: int) -> bytes:
        """Read bytes `start` to ``stop - 1`` of an object, which must have the given Stamp."""
        async with self._slots:
            return await retried(url, lambda: self._read(url, expected, start, stop))

    async def _stamp(self, url):
        if self.protocol in HTTP:
            return await self._http_stamp(url)
        try:
            info = await self.fs._info(self.fs._strip_protocol(url))
        except FileNotFoundError as error:
            if _is_missing_bucket(error):
                raise
            return None
        return _stamp_of(info) if info["type"] == "file" else None

    async def _http_stamp(self, url):
        """Return the Stamp of an HTTP URL, or None if it is an index page or does not exist.

        The method of fsspec is not used, because it reports every error as a missing file.
        """
        session = await self._http.set_session()
        for method in ("HEAD", "GET"):  # some servers do not support HEAD
            async with session.request(method, self.fs.encode_url(url)) as reply:
                if reply.status in (404, 410) or reply.content_type == "text/html":
                    return None
                if method == "HEAD" and reply.status in (405, 501):
                    continue
                if reply.status >= 300:  # including a redirection without a target
                    raise refusal(reply.status, reply.reason, await reply.read())
                if reply.content_length is not None:
                    return Stamp(reply.content_length, _version(reply.headers))
        raise UserError(f"{printable(url)}: the server does not report the size of the object")

    async def _listing(self, url):
        self.fs.invalidate_cache()
        single = await self._stamp(url)
        if single is not None:
            return {"": single}
        root = self.fs._strip_protocol(url).rstrip("/")
        try:
            infos = await self.fs._find(root, detail=True)
        except FileNotFoundError as error:
            if _is_missing_bucket(error):
                raise
            return {}
        stamps = {
            path: None if info.get("size") is None else _stamp_of(info)
            for path, info in infos.items()
            if info["type"] == "file" and not path.endswith("/")
        }
        await self._complete(stamps)
        return {
            self._decoded(path[len(root) :].lstrip("/")): stamp
            for path, stamp in stamps.items()
            if stamp is not None
        }

    def _decoded(self, name):
        """Remove percent-encoding from a name in an HTTP index page. Requests add it again."""
        decoded = unquote(name) if self.protocol in HTTP else name
        return name if any(c in decoded for c in "%?#") else decoded

    async def _complete(self, stamps):
        """Request the Stamps that are None. Index pages of HTTP servers contain only names."""

        async def ask(path):
            async with self._slots:
                stamps[path] = await retried(path, lambda: self._stamp(path))

        await asyncio.gather(*(ask(path) for path, value in stamps.items() if value is None))

    async def _read(self, url, expected, start, stop):
        is_whole = start == 0 and stop == expected.size
        span = None if is_whole else f"bytes={start}-{stop - 1}"
        if self.protocol in ("s3", "s3a"):
            content, now = await self._get(await self._signed(url), span)
        elif self.protocol in HTTP:
            content, now = await self._get(self.fs.encode_url(url), span)
        else:
            now = await self._stamp(url)
            if now is None:
                raise FileNotFoundError(url)
            path = self.fs._strip_protocol(url)
            ends = {} if is_whole else {"start": start, "end": stop}
            content = await self.fs._cat_file(path, **ends)
        if now != expected:
            raise changed(url, expected, now)
        if len(content) != stop - start and len(content) == expected.size:  # no support for Range
            content = content[start:stop]
        if len(content) != stop - start:
            raise ConnectionError(f"expected {stop - start} bytes, found {len(content)}")
        return content

    async def _signed(self, url):
        """Return a signed HTTP URL for reading an S3 object.

        A plain HTTP request needs only a fraction of the processor time of the client's method.
        """
        bucket, key, _ = self.fs.split_path(url)
        if bucket not in self._urls:  # `get_s3` may request the bucket's region
            await self.fs.set_session()
            client = await self.fs.get_s3(bucket)
            self._urls[bucket] = BucketUrls(client, bucket)
        return await self._urls[bucket].url(key)

    async def _get(self, url, span):
        """Read an HTTP URL, and return the bytes and the Stamp of the object."""
        from yarl import URL

        session = await self._http.set_session()
        headers = {"Range": span} if span else {}
        async with session.get(URL(url, encoded=True), headers=headers) as reply:
            content = await reply.read()
            if reply.status >= 300:  # including a redirection without a target
                raise refusal(reply.status, reply.reason, content)
            total = reply.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(total) if total.isdigit() else len(content)
            return content, Stamp(size, _version(reply.headers))


async def _http_client(**options):
    """Return an HTTP client with the timeouts, certificates and proxies of this process."""
    import ssl
    from urllib.request import getproxies

    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    bundle = os.environ.get("AWS_CA_BUNDLE")
    return ClientSession(
        connector=TCPConnector(ssl=ssl.create_default_context(cafile=bundle)),
        timeout=ClientTimeout(None, connect=CONNECT_SECONDS, sock_read=READ_SECONDS),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,  # objects may be stored compressed
        trust_env=bool(getproxies()),  # if True, each request spends time looking for proxies
    )


def _filesystem(protocol, configuration):
    """Return fsspec's asynchronous file system for a protocol.

    Raises UserError if fsspec does not know the protocol, or if a required package is missing.
    """
    try:
        import fsspec
    except ModuleNotFoundError:
        raise UserError(
            f"{protocol}://: expected the package fsspec, which is not installed: "
            + pip_install("s3")
        ) from None
    options: dict[str, Any] = {}
    if protocol in ("s3", "s3a"):
        options = {
            "endpoint_url": configuration.endpoint_url,
            "cache_regions": True,
            "use_listings_cache": False,
            "config_kwargs": {
                "connect_timeout": CONNECT_SECONDS,
                "read_timeout": READ_SECONDS,
                "max_pool_connections": configuration.requests,
                "retries": {"total_max_attempts": 1},  # `retried` repeats requests
            },
        }
    elif protocol in HTTP:
        options = {"get_client": _http_client}
    try:
        fs = fsspec.filesystem(protocol, skip_instance_cache=True, **options)
    except ImportError as error:
        text = f"a package is missing: {describe(error)}"
        if protocol in PACKAGES:
            package, extra = PACKAGES[protocol]
            command = pip_install(extra) if extra else f"pip install {package}"
            text = f"expected the package {package}, which is not installed: {command}"
        raise UserError(f"{protocol}://: {text}") from None
    except Exception as error:
        is_protocol = protocol in fsspec.available_protocols()
        text = describe(error) if is_protocol else "expected a protocol that fsspec knows"
        raise UserError(f"{protocol}://: {text}") from None
    if not fs.async_impl:
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        fs = AsyncFileSystemWrapper(fs, asynchronous=False)
    return fs


def _is_missing_bucket(error):
    response = getattr(error.__cause__, "response", {})
    return response.get("Error", {}).get("Code") == "NoSuchBucket"


def _stamp_of(info):
    return Stamp(int(info["size"]), _version(info))


def _version(info):
    """Return a nonnegative number that changes with the content of an object."""
    version = next((info[name] for name in VERSIONS if info.get(name) is not None), "")
    if isinstance(version, datetime.datetime):  # listings may contain the time as a number
        version = version.timestamp()
    return int.from_bytes(hashlib.sha256(str(version).encode()).digest()[:8], "little") >> 1
