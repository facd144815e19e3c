"""The server of the live page: Bokeh's server, restricted to requests with a token."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.resources import Resources
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from mpidl.report.live.page import Page
from mpidl.report.live.run import LiveRun

LAST_SECONDS = 0.3  # time for the last update of open pages at the end
REFUSAL = "mpidl: wrong or missing token: open the URL that the command printed\n"
COMPONENTS = ("bokeh", "bokeh-widgets")
# Limits against requests without the token. The page itself sends only websocket messages.
LIMITS: dict[str, Any] = {
    "max_body_size": 1 << 16,
    "body_timeout": 10,
    "idle_connection_timeout": 60,
}


class Refusal(RequestHandler):
    """Answers every request with status 403 and one line."""

    def prepare(self) -> None:
        self.set_status(403)
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(REFUSAL)

    def check_xsrf_cookie(self) -> None:
        """Do not require a cookie, because `prepare` refuses every request."""


class GuardedApplication(BokehTornado):
    """Bokeh's application, which answers only requests with the token.

    Bokeh's scripts contain no data of runs and need no token. No other file can be
    requested, because the page is the only path.

    Parameters
    ----------
    application : Application
        The application that makes the page of a session.
    token : str
        The token in the URL of the page. Pages of other servers do not know the token, so the
        websocket accepts any origin, and a browser may use any name of the host.
    """

    def __init__(self, application: Application, token: str) -> None:
        self.token = token.encode()
        super().__init__(
            {"/": application},
            extra_websocket_origins=["*"],
            include_headers=["Host"],
            include_cookies=["mpidl"],
            compress_response=True,
        )

    def resources(self, absolute_url: str | bool | None = None) -> Resources:
        """Return only the scripts that the page needs."""
        scripts = super().resources(absolute_url)
        scripts.components = [name for name in scripts.components if name in COMPONENTS]
        return scripts

    def find_handler(self, request: HTTPServerRequest, **keywords: Any) -> Any:
        """Return the handler of a request, which is `Refusal` if the request has no token."""
        if self._is_script(request) or self._has_token(request):
            return super().find_handler(request, **keywords)
        return self.get_handler_delegate(request, Refusal)

    @staticmethod
    def _is_script(request):
        return request.method == "GET" and request.path.startswith("/static/js/")

    def _has_token(self, request):
        tokens = request.query_arguments.get("token", [])
        return len(tokens) == 1 and secrets.compare_digest(tokens[0], self.token)


class MonitorServer:
    """Serves the page of runs until `stop` is called.

    Parameters
    ----------
    runs : sequence of LiveRun
        The runs.
    sockets : sequence of socket
        Listening sockets.
    token : str
        The token.
    """

    def __init__(
        self, runs: Sequence[LiveRun], sockets: Sequence[socket.socket], token: str
    ) -> None:
        logging.getLogger("bokeh").setLevel(logging.CRITICAL)
        logging.getLogger("tornado").setLevel(logging.CRITICAL)
        self.pages: list[Page] = []
        handler = FunctionHandler(lambda document: self._open(document, runs))
        self.loop = IOLoop.current()
        application = GuardedApplication(Application(handler), token)
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
