"""Run a real object store on loopback (seaweedfs), behind a proxy that injects faults."""

import contextlib
import http.client
import http.server
import json
import os
import shutil
import socket
import subprocess
import threading

from limits import wait_until

ACCESS, SECRET = "mpidl-access", "mpidl-secret-of-the-tests"


def _free_ports(count):
    """Return free ports. Adding 10000 gives free ports, too, which seaweedfs uses for gRPC."""
    ports = []
    while len(ports) < count:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1] % 20000 + 20000
        with contextlib.suppress(OSError), socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", port))
            high.bind(("127.0.0.1", port + 10000))
            if port not in ports:
                ports.append(port)
    return ports


class ObjectStore:
    """A running store with the endpoint `url`."""

    def __init__(self, folder):
        s3, master, volume, filer = _free_ports(4)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        }
        folder.mkdir()
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        options = {
            "dir": folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": s3,
            "s3.config": folder / "s3.json",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.autoCreateBucket": "false",
            "master.port": master,
            "master.volumeSizeLimitMB": 64,
            "master.telemetry": "false",
            "volume.port": volume,
            "volume.max": 20,
            "filer.port": filer,
            "filer.localSocket": folder / "filer.sock",
            "s3.localSocket": folder / "s3.sock",
        }
        words = [f"-{name}={value}" for name, value in options.items()]
        self.port, self.url = s3, f"http://127.0.0.1:{s3}"
        self.log = open(folder / "log", "w+")
        self.process = subprocess.Popen(
            [shutil.which("weed"), "server", "-s3", *words],
            stdout=self.log,
            stderr=self.log,
            cwd=folder,
            start_new_session=True,
        )

    def wait(self):
        """Wait until the store answers and has the bucket "bucket"."""
        fs = self.files()

        def is_ready():
            if self.process.poll() is not None:
                self.log.seek(0)
                raise AssertionError(self.log.read()[-2000:])
            try:
                fs.invalidate_cache()
                if not fs.exists("bucket"):
                    fs.mkdir("bucket")
                fs.pipe("bucket/ready", b"yes")
                return True
            except Exception:
                return False

        wait_until(is_ready)

    def files(self):
        """Return the store as an fsspec file system."""
        import s3fs

        return s3fs.S3FileSystem(
            key=ACCESS, secret=SECRET, endpoint_url=self.url, skip_instance_cache=True
        )

    def put(self, path, name):
        """Copy a local file or folder to s3://bucket/name and return this URL."""
        paths = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        names = {p: "" if p == path else f"/{p.relative_to(path)}" for p in paths}
        self.files().pipe({f"bucket/{name}{names[p]}": p.read_bytes() for p in paths})
        return f"s3://bucket/{name}"

    def close(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


def credentials(url, secret=SECRET):
    """Return the environment of a job that uses the store with endpoint `url`."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL": url,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class LoopbackServer(http.server.ThreadingHTTPServer):
    """A server on loopback that runs in threads of this process and prints nothing."""

    daemon_threads = True

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # a client has closed its connection


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """A handler that keeps connections open and does not print a line per request."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass


class Proxy(LoopbackServer):
    """A proxy that passes requests on to a store and injects faults.

    `fault` is called with the number of an object's GET request, starting at 1. It returns None to
    pass the request on, "drop" to close the connection in the middle of the reply, "refuse" to
    close the connection before the reply, an HTTP status for the answer, or a function to call
    before the request is passed on.
    """

    def __init__(self, port):
        self.store_port, self.fault = port, lambda number: None
        self.count, self.lock, self.faults = 0, threading.Lock(), []
        super().__init__(_Handler)

    def plant(self, fault):
        """Inject a fault, and count requests from 1 again."""
        self.count, self.fault, self.faults = 0, fault, []


class _Handler(QuietHandler):
    def _pass_on(self):
        server, fault = self.server, None
        if self.command == "GET" and "list-type" not in self.path:
            with server.lock:
                server.count += 1
                number = server.count
            fault = server.fault(number)
            if callable(fault):
                fault = fault()
            if fault is not None:
                server.faults.append(fault)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault == "refuse":
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._answer(fault, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        connection = http.client.HTTPConnection("127.0.0.1", server.store_port)
        headers = dict(self.headers.items())
        connection.request(self.command, self.path, body, headers)
        reply = connection.getresponse()
        content = reply.read()
        headers = {k: v for k, v in reply.getheaders() if k.lower() not in _REPLACED}
        if self.command == "HEAD":
            headers["Content-Length"] = reply.getheader("Content-Length")
        self._answer(reply.status, headers, content, cut=fault == "drop")
        connection.close()

    def _answer(self, status, headers, content, cut=False):
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = cut or self.close_connection

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


_REPLACED = {"content-length", "connection", "transfer-encoding", "server", "date"}
