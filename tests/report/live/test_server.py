"""Test that the server answers only requests with the token and serves no files."""

import http.client
import json
import re
import socket
import threading

import pytest
from image_sets import refusal

import mpidl as dl
from mpidl.report.live import address
from mpidl.report.live.run import runs_of

pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'mpidl[monitor]'")
SECRET = "the content of a file outside of the run"


class Served:
    """A server in a thread of this process, with a run in the folder `run`."""

    def __init__(self, folder):
        self.run = folder / "run"
        self.run.mkdir()
        record = {"kind": "iteration", "epoch": 1, "iteration": 1, "loss": 0.25, "seconds": 1.0}
        (self.run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        (self.run / "notes.txt").write_text(SECRET)
        (folder / "secret").write_text(SECRET)
        self.page = address.listen()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()
        self.ready.wait()

    def _serve(self):
        from mpidl.report.live.server import MonitorServer

        paths = [str(self.run)]
        self.server = MonitorServer(runs_of(paths), [self.page.listener], self.page.token)
        self.ready.set()
        self.server.run()

    def get(self, path, method="GET", headers=()):
        """Return (status, body) of a request with this exact path."""
        connection = http.client.HTTPConnection(address.LOOPBACK, self.page.port)
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
        connection.close()
        return answer.status, body

    def connect(self, query, origin, token):
        """Return the HTTP status of a request for the websocket."""
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Protocol": f"bokeh, {token}",
            "Origin": origin,
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        host = f"Host: {address.LOOPBACK}:{self.page.port}"
        request = "\r\n".join([f"GET /ws{query} HTTP/1.1", host, *lines, "", ""])
        with socket.create_connection((address.LOOPBACK, self.page.port)) as client:
            client.sendall(request.encode())
            return int(client.recv(4096).split()[1])

    def close(self):
        self.server.stop()
        self.thread.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    served.close()


def session_token(body):
    return re.search(r'"token":"([^"]+)"', body)[1]


def test_the_page_needs_the_token(served):
    token = served.page.token
    status, body = served.get(f"/?token={token}")
    assert status == 200 and "Learning rate" in body
    assert "https://" not in body and "cdn.bokeh.org" not in body  # the page works offline
    refused = "mpidl: wrong or missing token: open the URL that the command printed\n"
    other_token = token[:-1] + ("A" if token[-1] != "A" else "B")
    for path in ("/", "/?token=", f"/?token={other_token}", f"/?token={token}&token={other_token}"):
        assert served.get(path) == (403, refused), path
    for path in ("/autoload.js?bokeh-autoload-element=1", "/metadata", "/ws", "/none", "/static/"):
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
            assert served.get(path, method) == (403, refused), (method, path)
    assert served.get("/", headers={"Cookie": f"token={token}"})[0] == 403


def test_the_websocket_needs_the_token(served):
    token, port = served.page.token, served.page.port
    query, session = f"?token={token}", session_token(served.get(f"/?token={token}")[1])
    # Through a tunnel or with --host, a browser may reach the page under any name.
    for host in ("127.0.0.1", "localhost:8080", "[::1]:80", "10.0.0.7", "node17.cluster"):
        assert served.connect(query, f"http://{host}", session) == 101, host
    for words in ("", "?token=wrong"):
        assert served.connect(words, f"http://127.0.0.1:{port}", session) == 403, words


def test_a_large_body_is_refused_before_it_is_read(served):
    lines = ["POST / HTTP/1.1", f"Host: {address.LOOPBACK}", f"Content-Length: {100 << 20}"]
    with socket.create_connection((address.LOOPBACK, served.page.port)) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 400 ")  # before any byte of the body


@pytest.mark.parametrize("token", [True, False])
def test_no_request_reads_a_file(served, token):
    query = f"?token={served.page.token}" if token else ""
    paths = ["/metrics.jsonl", "/notes.txt", "/run/notes.txt", "/secret", "/etc/passwd"]
    paths += [str(served.run / "notes.txt"), "/favicon.ico/../notes.txt"]
    for up in ("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "....//"):
        for depth in (1, 3, 12):
            paths += [f"/static/js/{up * depth}etc/passwd", f"/static/{up * depth}etc/passwd"]
            paths += [f"/{up * depth}etc/passwd"]
    paths += ["/static/js//etc/passwd", "/static/js/%00", "/static/extensions/x/../../etc/passwd"]
    paths += [f"/static/js/{'../' * 20}{str(served.run)[1:]}/notes.txt"]
    for path in paths:
        status, body = served.get(path + query)
        assert status in (400, 403, 404, 500), path
        assert "root:" not in body and SECRET not in body, path


def test_a_query_cannot_name_a_run(served):
    token = served.page.token
    names = ("run", "path", "folder", "file")
    body = served.get("&".join([f"/?token={token}", *(f"{name}=/etc" for name in names)]))[1]
    assert "/etc" not in body.replace("/etc&", "")


def test_scripts_need_no_token(served):
    status, body = served.get("/static/js/bokeh.min.js")
    assert status == 200 and "Bokeh" in body


def test_a_port_in_use_is_one_line(served):
    port = served.page.port
    text = refusal(address.listen, port=port)
    assert text == (
        f"--port {port}: cannot listen: Address already in use; --port 0 takes a free port"
    )
    text = refusal(address.listen, port=port, option="--monitor")
    assert text.startswith(f"--monitor {port}: cannot listen")
    assert refusal(address.listen, "no.such.host.invalid").startswith("--host no.such.host.invalid")
    assert refusal(address.listen, "192.0.2.1").startswith("--host 192.0.2.1, --port 0: cannot")


@pytest.mark.parametrize("host", ["127.0.0..1", "a" * 64])
def test_a_name_that_cannot_be_encoded_is_one_line(host):
    expected = "expected an address of this machine: not the name of a host"
    assert refusal(address.listen, host) == f"--host {host}: {expected}"


@pytest.mark.parametrize("version", ["3.7.3", "2.4.0"])
def test_an_old_bokeh_is_one_line(monkeypatch, version):
    address.need_bokeh("--monitor")
    monkeypatch.setattr(address.importlib.metadata, "version", lambda package: version)
    text = f"--monitor: expected bokeh 3.8 or newer, found {version}: pip install 'mpidl[monitor]'"
    assert refusal(address.need_bokeh, "--monitor") == text


@pytest.mark.parametrize("host", ["127.0.1.1", "::1"])
def test_the_tunnel_leads_to_the_address_of_the_server(monkeypatch, host):
    monkeypatch.delenv("SLURM_SUBMIT_HOST", raising=False)
    try:
        page = address.listen(host)
    except dl.UserError as error:
        pytest.skip(f"the host has no such address: {error}")
    with page.listener:
        end = f"[{host}]:{page.port}" if ":" in host else f"{host}:{page.port}"
        url, way = page.lines()
        assert url.startswith(f"Monitor: http://{end}/?token=")
        assert f"ssh -N -L {end}:{end} " in way


def test_loopback_only_unless_told(monkeypatch):
    monkeypatch.setenv("SLURM_SUBMIT_HOST", "login1")
    page = address.listen()
    assert page.listener.getsockname()[0] == "127.0.0.1"
    url, way = page.lines()
    assert url == f"Monitor: http://127.0.0.1:{page.port}/?token={page.token}"
    assert f"ssh -N -J login1 -L {page.port}:127.0.0.1:{page.port} " in way
    assert len(page.token) > 20 and page.token != address.listen().token
    everywhere = address.listen("0.0.0.0")
    assert everywhere.lines() == [f"Monitor: {everywhere.url()}"]
    assert socket.getfqdn() in everywhere.url()
