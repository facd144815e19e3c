"""Test that the server answers only requests with the token and serves no files."""

import http.client
import io
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
# Hosts in the URL of a page through a tunnel, from the same network, and through a proxy that the
# fixture allows. The port is the one of the tunnel, on the computer of the browser.
REACHABLE = ("127.0.0.1", "localhost:8080", "LOCALHOST.", "[::1]:80", "10.0.0.7:9", "proxy.example")
REACHABLE += (f"{socket.gethostname()}:80",)
# Names of websites that could resolve to 127.0.0.1, and headers that no browser sends.
FOREIGN = ("attacker.example", "attacker.example:80", "localhost.attacker.example", "127.0.0.1.nip")
FOREIGN += ("a.proxy.example",)
DAMAGED = ("user@localhost", "localhost/", "[::1", "localhost:80:80", "[local]", "localhost, a")


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
        listeners, token = [self.page.listener], self.page.token
        self.server = MonitorServer(runs_of(paths), listeners, token, ["proxy.example"])
        self.ready.set()
        self.server.run()

    def get(self, path, method="GET", headers=()):
        """Return (status, body) of a request with this exact path."""
        status, _, body = self.request(path, method, headers)
        return status, body

    def request(self, path, method="GET", headers=()):
        """Return (status, headers, body) of a request with this exact path."""
        connection = http.client.HTTPConnection(address.LOOPBACK, self.page.port)
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        body = answer.read().decode(errors="replace")
        connection.close()
        return answer.status, answer.headers, body

    def connect(self, query, origin, token, host=None):
        """Return the HTTP status of a request for the websocket."""
        return self.upgrade(query, origin, token, host)[0]

    def upgrade(self, query, origin, token, host=None):
        """Return (status, headers) of a request for the websocket."""
        headers = {
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
            "Sec-WebSocket-Protocol": f"bokeh, {token}",
            "Origin": origin,
        }
        lines = [f"{name}: {value}" for name, value in headers.items()]
        host = f"Host: {host or f'{address.LOOPBACK}:{self.page.port}'}"
        request = "\r\n".join([f"GET /ws{query} HTTP/1.1", host, *lines, "", ""])
        with socket.create_connection((address.LOOPBACK, self.page.port)) as client:
            client.sendall(request.encode())
            start, _, rest = client.recv(4096).partition(b"\r\n")
            return int(start.split()[1]), http.client.parse_headers(io.BytesIO(rest))

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
    for host in REACHABLE:
        assert served.connect(query, f"http://{host}", session, host) == 101, host
    assert served.connect(query, "https://proxy.example", session) == 101  # the proxy changes Host
    for host in FOREIGN:
        assert served.connect(query, f"http://127.0.0.1:{port}", session, host) == 403, host
        assert served.connect(query, f"http://{host}", session) == 403, host
    for host in DAMAGED:
        assert served.connect(query, f"http://127.0.0.1:{port}", session, host) in (400, 403), host
    for origin in ("null", "file://", "127.0.0.1", "ftp://127.0.0.1"):
        assert served.connect(query, origin, session) == 403, origin
    for words in ("", "?token=wrong"):
        assert served.connect(words, f"http://127.0.0.1:{port}", session) == 403, words


def test_only_known_hosts_are_answered(served):
    """A page of another site cannot reach the server by pointing its own name to 127.0.0.1."""
    query = f"?token={served.page.token}"
    for host in REACHABLE:
        assert served.get(f"/{query}", headers={"Host": host})[0] == 200, host
    for host in FOREIGN:
        for path in (f"/{query}", f"/metadata{query}", "/static/js/bokeh.min.js", "/", "/none"):
            status, body = served.get(path, headers={"Host": host})
            assert (status, body[:26]) == (403, "mpidl: unknown host name: "), (host, path)
    for host in DAMAGED:
        assert served.get(f"/{query}", headers={"Host": host})[0] in (400, 403), host
    with socket.create_connection((address.LOOPBACK, served.page.port)) as client:
        client.sendall(f"GET /{query} HTTP/1.0\r\n\r\n".encode())
        assert client.recv(4096).split()[1] == b"403"


def test_a_server_for_other_computers_knows_its_full_name():
    with (
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.create_server(("127.0.0.1", 0)) as local,
    ):
        names = address.HostNames([everywhere], ["given.example"])
        assert names.accept(f"{socket.getfqdn()}:80") and names.accept("Given.Example")
        assert not names.accept("attacker.example")
        assert not address.HostNames([local]).accept("given.example")
    assert address.host_names("a.example, b") == ("a.example", "b")
    for text in ("a:80", "http://a", "", "a,,b"):
        expected = f"--allow-host must be NAME,NAME,... without ports, found {text}"
        assert refusal(address.host_names, text) == expected


def test_every_answer_has_the_headers_that_protect_it(served):
    """The headers are on pages, scripts, errors and the websocket's upgrade."""
    query = f"?token={served.page.token}"
    expected = {
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
        "Content-Security-Policy": "frame-ancestors 'none'",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    session = session_token(served.get(f"/{query}")[1])
    answers = [served.upgrade(query, f"http://127.0.0.1:{served.page.port}", session)]
    answers += [served.upgrade("", "http://127.0.0.1", session)]
    for path, method in (
        (f"/{query}", "GET"),
        (f"/{query}", "HEAD"),
        (f"/{query}", "DELETE"),
        (f"/metadata{query}", "GET"),
        (f"/autoload.js{query}", "GET"),  # without its argument: an error of the handler
        (f"/none{query}", "GET"),
        (f"/ws{query}", "GET"),  # no upgrade
        ("/static/js/bokeh.min.js", "GET"),
        ("/static/js/none.js", "GET"),
        ("/static/js/", "GET"),
        ("/", "GET"),
    ):
        answers.append(served.request(path, method)[:2])
    answers.append(served.request("/", headers={"Host": "attacker.example"})[:2])
    assert {101, 200, 400, 403, 404, 405} <= {status for status, _ in answers}
    for status, headers in answers:
        for name, value in expected.items():
            assert headers.get_all(name) == [value], (status, name)


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
