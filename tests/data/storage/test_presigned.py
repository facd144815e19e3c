"""Test signed URLs of S3 against botocore, which signs each URL separately."""

import asyncio
from types import SimpleNamespace

import object_store
import pytest

from mpidl.data.storage import presigned

REASON = "botocore is not installed: pip install 'mpidl[s3]'"
sessions = pytest.importorskip("botocore.session", reason=REASON)
KEYS = ["a.jpg", "a b/ü~+&=?#%41.jpg", "./x//../y", "/", "'()*!,:@$;[]"]


class Client:
    """A client of S3 with credentials and with the asynchronous methods of aiobotocore."""

    def __init__(self, **place):
        session = sessions.get_session()
        session.set_credentials("ID", "secret/key")
        self.client = session.create_client("s3", **place)
        self.credentials, self.count = session.get_credentials(), 0
        self.meta, self._request_signer = self.client.meta, SimpleNamespace(_credentials=self)
        presigned.BucketUrls(self, "bucket")  # chooses the version of the signatures

    def sign(self, bucket, key):
        place = {"Bucket": bucket, "Key": key}
        return self.client.generate_presigned_url("get_object", place, presigned.VALID_SECONDS)

    async def generate_presigned_url(self, method, place, seconds):
        self.count += 1
        return self.client.generate_presigned_url(method, place, seconds)

    async def get_frozen_credentials(self):
        return self.credentials.get_frozen_credentials()


@pytest.fixture(scope="module", params=["amazon", "endpoint"])
def client(request):
    if request.param == "amazon":
        return Client(region_name="us-east-1")
    return Client(endpoint_url="https://store.example:9000/prefix", region_name="x")


def in_one_second(sign):
    """Return {key: URL} of all keys, signed within the same second."""
    while True:
        urls = {key: sign(key) for key in KEYS}
        if len({url.partition("X-Amz-Date=")[2][:16] for url in urls.values()}) == 1:
            return urls


def test_the_urls_are_those_of_botocore(client):
    for bucket, token in (("bucket", None), ("with.dots", "a/token+of=a role")):
        client.credentials.token = token
        urls = in_one_second(lambda key, bucket=bucket: client.sign(bucket, key))
        assert ("X-Amz-Security-Token=" in urls["/"]) == (token is not None)
        for one_key in KEYS:
            template = presigned.make_template(urls[one_key], one_key, "secret/key")
            assert {key: template.sign(key) for key in KEYS} == urls
            assert template.key.hex() not in repr(template) and "ID" not in repr(template)
            assert presigned.make_template(urls[one_key], one_key, "another") is None
    client.credentials.token = None


def test_the_client_signs_again_with_its_current_credentials(client, monkeypatch):
    """URLs are signed with new credentials after a minute, or if the clock has been set back."""
    now, renew = [1e9], presigned.RENEW_SECONDS
    monkeypatch.setattr(presigned, "time", SimpleNamespace(time=lambda: now[0]))
    urls, before = presigned.BucketUrls(client, "bucket"), client.count
    for seconds, count in ((0, 1), (renew - 1, 1), (renew, 2), (1, 2), (0, 3)):
        now[0] = 1e9 + seconds
        for key in KEYS:
            asyncio.run(urls.url(key))
        assert client.count == before + count
    monkeypatch.setattr(client.credentials, "secret_key", "another")
    now[0] *= 2
    for key in KEYS:
        url = asyncio.run(urls.url(key))
        assert presigned.make_template(url, key, "another").sign(key) == url
        assert presigned.make_template(url, key, "secret/key") is None
    assert client.count == before + 4


@pytest.mark.parametrize("session_keys", [(), ("OTHER", "another")])
def test_keys_that_only_the_client_has(session_keys, monkeypatch):
    """Keys from fsspec's settings are used. The client has them, but its session does not."""
    library = pytest.importorskip("aiobotocore.session", reason=REASON)
    for name, value in object_store.credentials("http://store.example:9000").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    async def signed_urls():
        session = library.get_session()
        if session_keys:
            session.set_credentials(*session_keys)
        keys = {"aws_access_key_id": "ID", "aws_secret_access_key": "secret/key"}
        async with session.create_client("s3", region_name="x", **keys) as client:
            urls = presigned.BucketUrls(client, "bucket")
            first = await urls.url("a")
            client.generate_presigned_url = None  # the other URLs need no client
            return first, [await urls.url(key) for key in KEYS]

    first, urls = asyncio.run(signed_urls())
    template = presigned.make_template(first, "a", "secret/key")
    assert urls == [template.sign(key) for key in KEYS]


@pytest.mark.parametrize(
    "query", ["", "?AWSAccessKeyId=ID&Signature=x&Expires=1", f"?X{presigned.SIGNATURE}x"]
)
def test_urls_of_another_kind_are_left_to_the_client(query):
    """The client signs for anonymous buckets, older signatures, and sessions of a bucket."""

    class Other(Client):
        def __init__(self):
            events = SimpleNamespace(register_first=lambda event, handler: None)
            self.meta = SimpleNamespace(events=events)
            self._request_signer = SimpleNamespace(_credentials=self)
            self.credentials = SimpleNamespace(
                get_frozen_credentials=lambda: SimpleNamespace(secret_key="secret/key")
            )

        async def generate_presigned_url(self, method, place, seconds):
            return f"https://{place['Bucket']}.store/{place['Key']}{query}"

    urls = presigned.BucketUrls(Other(), "bucket")
    for key in ("a", "b"):
        assert asyncio.run(urls.url(key)) == f"https://bucket.store/{key}{query}"
