"""Repeat requests that fail temporarily, and describe persistent errors in one line."""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mpidl.data.storage import settings
from mpidl.errors import StorageFault, UserError
from mpidl.files import MAX_REASON
from mpidl.text import printable

T = TypeVar("T")
FIRST_DELAY, LONGEST_DELAY = 0.1, 10.0  # first and longest pause between attempts, in seconds
NOTICE_SECONDS = 5.0  # after this time in seconds, a message says that mpidl tries again
BUSY = {408, 429, 500, 502, 503, 504}  # HTTP status codes for which a later attempt may succeed
BUSY_CODES = {"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout", "InternalError"}
LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "urllib3", "requests")
# Errors of these libraries that another attempt cannot resolve.
LASTING = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "ParamValidationError",
    "InvalidURL",
    "NonHttpUrlClientError",
}
HINTS = {
    401: "check the credentials of this rank",
    403: "check the credentials of this rank and their permissions",
    404: "no such bucket or object",
}


class Refusal(Exception):
    """An error that a store reported. `response` has the same form as in botocore's errors."""

    def __init__(self, response: dict[str, dict]):
        super().__init__(response["Error"]["Message"])
        self.response = response


def refusal(status: int, reason: str | None, content: bytes) -> Refusal:
    """Return the error in an HTTP reply. S3 sends XML with a code and a message."""
    code, message = (
        re.search(f"<{name}>([^<]*)</{name}>".encode(), content[:10000])
        for name in ("Code", "Message")
    )
    error = {
        "Code": code[1].decode(errors="replace") if code else "",
        "Message": message[1].decode(errors="replace") if message else reason or "",
    }
    return Refusal({"Error": error, "ResponseMetadata": {"HTTPStatusCode": status}})


async def retried(url: str, attempt: Callable[[], Awaitable[T]]) -> T:
    """Await ``attempt()`` repeatedly until it succeeds, with exponential backoff and jitter.

    Raises
    ------
    UserError
        If the store refuses the request, or if the object does not exist.
    StorageFault
        If the store is busy or does not answer for `retry_seconds`.
    """
    start, delay, limit = time.monotonic(), FIRST_DELAY, settings.current().retry_seconds
    while True:
        try:
            return await attempt()
        except (UserError, StorageFault):
            raise
        except Exception as error:
            text = describe(error)
            if not is_transient(error):
                raise UserError(f"{printable(url)}: {text}") from None
            wait, elapsed = delay * random.uniform(0.5, 1), time.monotonic() - start
            if elapsed + wait > limit:
                raise StorageFault(
                    f"{printable(url)}: the store did not answer for {limit:g} s "
                    f"(--retry-seconds): {text}"
                ) from None
            if elapsed > NOTICE_SECONDS:
                _notice(url, text, limit)
        await asyncio.sleep(wait)
        delay = min(2 * delay, LONGEST_DELAY)


def _notice(url, text, limit):
    """Print that requests fail, at most once every `limit` seconds per process."""
    if time.monotonic() - settings.ACCESS.notice_time > limit:
        settings.ACCESS.notice_time = time.monotonic()
        print(
            f"mpidl: {printable(url)}: {text}: trying again for {limit:g} s at most",
            file=sys.stderr,
            flush=True,
        )


def is_transient(error: BaseException) -> bool:
    """Return whether another attempt may succeed after an error."""
    code, status, _ = _reply(error)
    if status is not None:
        return status in BUSY or code in BUSY_CODES
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return False
    if any(kind.__name__ in LASTING for kind in type(error).__mro__):
        return False
    is_system = isinstance(error, OSError | EOFError | asyncio.TimeoutError)
    return is_system or type(error).__module__.startswith(LIBRARIES)


def describe(error: BaseException) -> str:
    """Describe an error of a store in one line."""
    code, status, message = _reply(error)
    if status is None and isinstance(error, FileNotFoundError):
        return HINTS[404]
    if any(kind.__name__.endswith("CredentialsError") for kind in type(error).__mro__):
        return "no credentials found: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
    text = " ".join(str(error).split()) or type(error).__name__
    if status is not None:
        parts = [code if code and not code.isdigit() else f"HTTP status {status}", message]
        text = ": ".join(str(part) for part in parts if part)
        text += f" ({HINTS[status]})" if status in HINTS else ""
    return "".join(c if c.isprintable() else "?" for c in text)[:MAX_REASON]


def _reply(error):
    """Return (error code, HTTP status, message) of the store's reply, which may be unknown."""
    origin = error  # the error of the store's library that caused an fsspec error
    while not hasattr(origin, "response") and origin.__cause__ is not None:
        origin = origin.__cause__
    response = getattr(origin, "response", None)
    if isinstance(response, dict) and "Error" in response:
        code, message = str(response["Error"].get("Code", "")), response["Error"].get("Message")
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        status = status or (code if code.isdigit() else None)
        return code, status and int(status), message or getattr(error, "message", "")
    status = getattr(error, "status", None)  # attribute of aiohttp's errors
    return None, status if isinstance(status, int) else None, getattr(error, "message", "")
