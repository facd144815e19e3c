"""The server of the live page as a separate process, which ends when training ends."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from typing import IO, cast

from mpidl import side_process
from mpidl.report.live.address import Address
from mpidl.report.live.run import runs_of

EXIT_SECONDS = 2.0  # longest time that the server waits for open pages at the end


class PageProcess:
    """The process of the server.

    It ends when `close` is called or when the calling process ends. The socket of the address is
    passed to the process. Browsers may connect before the process serves the page.
    """

    def __init__(self, folder: str, address: Address) -> None:
        descriptor = address.listener.fileno()
        self.process = side_process.start(
            ["-m", __name__, str(descriptor), folder],
            stdout=subprocess.DEVNULL,
            pass_fds=[descriptor],
        )
        self._stdin = cast(IO[bytes], self.process.stdin)
        address.listener.close()
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(f"{address.token}\n".encode())
            self._stdin.flush()

    def close(self) -> None:
        """Let the server show the last state of the run, and then end."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()


def main() -> int:
    """Serve the page until stdin ends. Rank 0 keeps stdin open."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    runs = runs_of(sys.argv[2:])
    side_process.give_way()
    token = sys.stdin.readline().strip()
    # Bokeh is imported when the first browser connects; until then the process uses no CPU time.
    readable, _, _ = select.select([listener, sys.stdin], [], [])
    if sys.stdin in readable or not token:
        return 0
    servers: list = []
    threading.Thread(target=_watch, args=[servers], daemon=True).start()
    from mpidl.report.live.server import MonitorServer

    servers.append(MonitorServer(runs, [listener], token))
    servers[0].run()
    return 0


def _watch(servers):
    """When stdin ends, stop the server and end the process."""
    sys.stdin.read()
    if servers:
        servers[0].stop()
        threading.Event().wait(EXIT_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    os._exit(main())  # skip the teardown of Bokeh, for which mpirun would wait
