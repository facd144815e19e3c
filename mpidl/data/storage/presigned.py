"""Sign the URLs of the objects in an S3 bucket, based on one URL that the S3 client signed.

The client needs about half a millisecond of processor time to sign a URL, more than for the request
itself. The URLs of a bucket differ only in the object's key and the signature. Therefore, this
module computes only the signature (Signature Version 4, an HMAC).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

VALID_SECONDS = 600  # validity of a signed URL in seconds; each URL is used immediately
RENEW_SECONDS = 60  # after this time, the client signs a URL with its current credentials again
SIGNATURE = "&X-Amz-Signature="


class Template(NamedTuple):
    """The common parts of a bucket's signed URLs, and the key that signs the URLs."""

    prefix: str
    """The URL up to the object's key."""
    query: str
    """The query without the signature."""
    path: str
    """The path of `prefix`."""
    request: str
    """The part of the canonical request after the path."""
    heading: str
    """The part of the string to sign before the digest of the request."""
    key: bytes
    """The signing key for the day, region and service."""

    def __repr__(self) -> str:  # do not show the signing key
        return f"Template({self.prefix!r})"

    def sign(self, key: str) -> str:
        """Return the signed URL of the object with the given key."""
        name = quote(key, safe="/~")
        request = f"GET\n{self.path}{name}\n{self.request}"
        text = self.heading + hashlib.sha256(request.encode()).hexdigest()
        signature = hmac.digest(self.key, text.encode(), "sha256").hex()
        return f"{self.prefix}{name}?{self.query}{SIGNATURE}{signature}"


class BucketUrls:
    """Signed URLs of the objects in one bucket."""

    def __init__(self, client: Any, bucket: str):
        self._client, self._bucket = client, bucket
        self._template: Template | None = None
        self._signing_time = 0.0  # seconds since 1970; other clocks stop if a machine is suspended
        client.meta.events.register_first("choose-signer.s3.GetObject", _choose_version)

    async def url(self, key: str) -> str:
        """Return a URL that allows reading an object for `VALID_SECONDS`."""
        now = time.time()
        if self._template is not None and abs(now - self._signing_time) < RENEW_SECONDS:
            return self._template.sign(key)
        place = {"Bucket": self._bucket, "Key": key}
        url = await self._client.generate_presigned_url("get_object", place, VALID_SECONDS)
        self._template, self._signing_time = await self._template_of(url, key), now
        return url

    async def _template_of(self, url, key):
        """Return the Template of a URL that the client has signed, or None; see `make_template`."""
        # Take the credentials of the client, because its session may have other credentials or
        # none: fsspec passes the keys in its settings only to the client.
        signer = getattr(self._client, "_request_signer", None)
        credentials = getattr(signer, "_credentials", None)
        if credentials is None or SIGNATURE not in url:
            return None
        secret = (await credentials.get_frozen_credentials()).secret_key
        return make_template(url, key, secret)


def _choose_version(signature_version, **_):
    """Select Version 4, because botocore signs URLs of the oldest regions with Version 2."""
    return "s3v4-query" if signature_version == "v4-query" else None


def make_template(url: str, key: str, secret: str) -> Template | None:
    """Return the Template of a bucket, from a URL that the client signed for the object `key`.

    The result is None if the template and the client would sign `key` differently, as in unsigned
    buckets and in buckets with separate sessions. The client then signs each URL.
    """
    address, _, query = url.partition("?")
    query = query.partition(SIGNATURE)[0]
    name = quote(key, safe="/~")
    fields = dict(field.partition("=")[::2] for field in query.split("&"))
    scope = unquote(fields.get("X-Amz-Credential", "")).split("/")[1:]
    if not address.endswith(name) or len(scope) != 4:
        return None
    prefix, parts = address.removesuffix(name), urlsplit(address)
    signing_key = f"AWS4{secret}".encode()
    for word in scope:  # day, region, service, "aws4_request"
        signing_key = hmac.digest(signing_key, word.encode(), "sha256")
    template = Template(
        prefix,
        query,
        parts.path.removesuffix(name),
        "&".join(sorted(query.split("&"))) + f"\nhost:{parts.netloc}\n\nhost\nUNSIGNED-PAYLOAD",
        f"AWS4-HMAC-SHA256\n{fields.get('X-Amz-Date')}\n{'/'.join(scope)}\n",
        signing_key,
    )
    return template if template.sign(key) == url else None
