"""The address of the live page: the socket, the URL, its host names, and the ssh command."""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Iterable
from typing import NamedTuple

from mpidl.errors import UserError
from mpidl.text import pip_install

LAST_PORT = 65535
LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 16
BACKLOG = 128
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+)(:[0-9]*)?", re.ASCII)  # name and port
OLDEST_BOKEH = (3, 8)  # the first version with DocumentConfig.reconnect_session


class Address(NamedTuple):
    """A listening socket, and the secret token that the page requires."""

    listener: socket.socket
    token: str

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    @property
    def is_local(self) -> bool:
        """Whether only programs on this host can connect."""
        return _is_loopback(self.listener)

    def url(self) -> str:
        """Return the URL of the page, with the token."""
        host = self.listener.getsockname()[0]
        if ipaddress.ip_address(host).is_unspecified:
            host = socket.getfqdn()
        return f"http://{_bracketed(host)}:{self.port}/?token={self.token}"

    def lines(self) -> list[str]:
        """Return the lines that tell the user how to open the page."""
        lines = [f"Monitor: {self.url()}"]
        if self.is_local:
            way = tunnel(*self.listener.getsockname()[:2])
            lines.append(f"From another computer, first: {way}")
        return lines


def listen(host: str = LOOPBACK, port: int = 0, option: str = "--port") -> Address:
    """Open the socket of the page; port 0 selects any free port.

    `option` is the flag of the port to name in error messages. Raises UserError if the port is in
    use or not permitted, or if the host is not an address of this machine.
    """
    if port > LAST_PORT:  # getaddrinfo would use the remainder
        raise UserError(f"{option} {port}: expected a port from 0 to {LAST_PORT}")
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = infos[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (socket.gaierror, UnicodeError) as error:  # UnicodeError if the name cannot be encoded
        cause = getattr(error, "strerror", None) or "not the name of a host"
        raise UserError(f"--host {host}: expected an address of this machine: {cause}") from None
    except OSError as error:
        text = f"{option} {port}" if host == LOOPBACK else f"--host {host}, {option} {port}"
        cause = os.strerror(error.errno) if error.errno else str(error)
        hint = f"; {option} 0 takes a free port" if port else ""
        raise UserError(f"{text}: cannot listen: {cause}{hint}") from None
    return Address(listener, secrets.token_urlsafe(TOKEN_BYTES))


class HostNames:
    """The names under which browsers may reach the page, in the header `Host` of a request.

    A website whose name resolves to this computer (DNS rebinding) sends its own name, which is
    refused. All IP addresses are accepted, because no website can be reached under an IP address of
    another computer. The port does not matter, because a tunnel may use any port. If other
    computers can connect, this host's full name is accepted.
    """

    def __init__(self, listeners: Iterable[socket.socket], further: Iterable[str] = ()) -> None:
        names = ["localhost", socket.gethostname(), *further]
        if not all(_is_loopback(listener) for listener in listeners):
            names.append(socket.getfqdn())
        names.append(socket.gethostname().partition(".")[0])
        self._names = {name.lower().rstrip(".") for name in names}

    def accept(self, host: str | None) -> bool:
        """Return whether a host, with or without a port, is an IP address or an accepted name."""
        match = HOST.fullmatch(host or "")
        if match is None:
            return False
        name = match[1].lower().rstrip(".")
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name in self._names
        return True

    def accept_origin(self, origin: str) -> bool:
        """Return whether the header `Origin` names a page of this server."""
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and self.accept(host)


def host_names(text: str) -> tuple[str, ...]:
    """Parse the value of --allow-host, host names separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        match = HOST.fullmatch(name)
        if match is None or match[2] is not None:
            raise UserError(f"--allow-host must be NAME,NAME,... without ports, found {text}")
    return names


def tunnel(address: str, port: int) -> str:
    """Return the ssh command that forwards a port of this host. The page's URL then works locally.

    In a Slurm job, the connection goes through the host from which the job was submitted.
    """
    login, host = os.environ.get("SLURM_SUBMIT_HOST"), socket.gethostname()
    jump = f"-J {login} " if login and login.partition(".")[0] != host.partition(".")[0] else ""
    try:
        user = f"{getpass.getuser()}@"
    except (OSError, KeyError):  # the user has no name on this host
        user = ""
    end = f"{_bracketed(address)}:{port}"
    start = port if address == LOOPBACK else end
    return f"ssh -N {jump}-L {start}:{end} {user}{host}"


def _is_loopback(listener):
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _bracketed(address):
    """Return an address in the notation of URLs and ssh."""
    return f"[{address}]" if ":" in address else address


def need_bokeh(option: str) -> None:
    """Raise UserError, which names `option`, if Bokeh is not installed or is too old."""
    way = pip_install("monitor")
    if importlib.util.find_spec("bokeh") is None:
        raise UserError(f"{option}: expected the package bokeh: {way}")
    version = importlib.metadata.version("bokeh")
    if tuple(map(int, version.split(".")[:2])) < OLDEST_BOKEH:
        oldest = ".".join(map(str, OLDEST_BOKEH))
        raise UserError(f"{option}: expected bokeh {oldest} or newer, found {version}: {way}")
