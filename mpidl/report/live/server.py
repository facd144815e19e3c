"""The server of the live page: Bokeh's server, restricted to known hosts and to a token."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.resources import Resources
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.web import OutputTransform, RequestHandler

from mpidl.report.live.address import HostNames
from mpidl.report.live.page import Page
from mpidl.report.live.run import LiveRun

LAST_SECONDS = 0.3  # time for the last update of open pages at the end
NO_TOKEN = "mpidl: wrong or missing token: open the URL that the command printed\n"
UNKNOWN_HOST = (
    "mpidl: unknown host name: open the URL that the command printed, or start another page that "
    "accepts the name: mpidl.monitor FOLDER --allow-host NAME\n"
)
# Headers of every answer. No other site may show the page in a frame, and neither the token in the
# URL nor the numbers of a run may remain in a cache or in the header Referer.
HEADERS = {
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
COMPONENTS = ("bokeh", "bokeh-widgets")
# Limits against requests without the token. The page itself sends only websocket messages.
LIMITS: dict[str, Any] = {
    "max_body_size": 1 << 16,
    "body_timeout": 10,
    "idle_connection_timeout": 60,
}


class Refusal(RequestHandler):
    """Answers every request with status 403 and one line, `reason`."""

    def initialize(self, reason: str) -> None:
        self.reason = reason

    def prepare(self) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(self.reason)

    def check_xsrf_cookie(self) -> None:
        """Do not require a cookie, because `prepare` refuses every request."""


class Headers(OutputTransform):
    """Adds `HEADERS` to every answer, including errors, scripts and the websocket's upgrade."""

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        headers.update(HEADERS)
        return status_code, headers, chunk


class GuardedApplication(BokehTornado):
    """Bokeh's application, which answers only requests to a known host with the token.

    Bokeh's scripts contain no data of runs and need no token. No other file can be requested,
    because the page is the only path.
    """

    def __init__(self, application: Application, token: str, hosts: HostNames) -> None:
        self.token, self.hosts = token.encode(), hosts
        super().__init__(
            {"/": application},
            extra_websocket_origins=["*"],  # find_handler checks the origin
            include_headers=["Host"],
            include_cookies=["mpidl"],
            compress_response=True,
        )
        self.add_transform(Headers)

    def resources(self, absolute_url: str | bool | None = None) -> Resources:
        """Return only the scripts that the page needs."""
        scripts = super().resources(absolute_url)
        scripts.components = [name for name in scripts.components if name in COMPONENTS]
        return scripts

    def find_handler(self, request: HTTPServerRequest, **keywords: Any) -> Any:
        """Return the handler of a request: `Refusal` without a known host or without the token."""
        if not self._has_known_host(request.headers):
            return self.get_handler_delegate(request, Refusal, {"reason": UNKNOWN_HOST})
        if self._is_script(request) or self._has_token(request):
            return super().find_handler(request, **keywords)
        return self.get_handler_delegate(request, Refusal, {"reason": NO_TOKEN})

    def _has_known_host(self, headers):
        origin = headers.get("Origin")
        is_same_site = origin is None or self.hosts.accept_origin(origin)
        return is_same_site and self.hosts.accept(headers.get("Host"))

    @staticmethod
    def _is_script(request):
        return request.method == "GET" and request.path.startswith("/static/js/")

    def _has_token(self, request):
        tokens = request.query_arguments.get("token", [])
        return len(tokens) == 1 and secrets.compare_digest(tokens[0], self.token)


class MonitorServer:
    """Serves the page of runs until `stop` is called.

    `further_hosts` are names of the server that `HostNames` does not know.
    """

    def __init__(
        self,
        runs: Sequence[LiveRun],
        sockets: Sequence[socket.socket],
        token: str,
        further_hosts: Iterable[str] = (),
    ) -> None:
        logging.getLogger("bokeh").setLevel(logging.CRITICAL)
        logging.getLogger("tornado").setLevel(logging.CRITICAL)
        self.pages: list[Page] = []
        handler = FunctionHandler(lambda document: self._open(document, runs))
        self.loop = IOLoop.current()
        hosts = HostNames(sockets, further_hosts)
        application = GuardedApplication(Application(handler), token, hosts)
        http_server = HTTPServer(application, **LIMITS)
        for listener in sockets:
            listener.setblocking(False)
        http_server.add_sockets(sockets)
        self.server = BaseServer(self.loop, application, http_server)
        self.server.start()

    def _open(self, document, runs):
        page = Page(document, runs)
        self.pages.append(page)
        document.on_session_destroyed(lambda context: self.pages.remove(page))

    def run(self) -> None:
        """Serve until `stop` is called or until the process receives SIGINT or SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            self.loop.add_callback(self._handle_signals)
        self.loop.start()

    def _handle_signals(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._finish)

    def stop(self) -> None:
        """Update the open pages one last time and end `run`. Any thread may call this method."""
        self.loop.add_callback(self._finish)

    def _finish(self):
        for page in self.pages:
            page.document.add_next_tick_callback(_last_update(page))
        self.loop.call_later(LAST_SECONDS, self.loop.stop)


def _last_update(page: Page) -> Callable[[], None]:
    def update():
        for run in page.runs:
            run.poll(at_once=True)
        page.update()

    return update
