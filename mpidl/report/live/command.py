"""`python -m mpidl.monitor`: show runs live in a browser, and stop them."""

import argparse
from collections.abc import Sequence

from mpidl.cli.parser import PORT, Parser
from mpidl.errors import UserError
from mpidl.ranks import failure
from mpidl.report.live import address
from mpidl.report.live.run import runs_of


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.monitor; `arguments.train` describes parameters and errors."""
    parser = Parser(
        "mpidl.monitor",
        "Show the curves of runs in a browser while they train, and stop them. The command reads\n"
        "and writes only the folders of the runs, so it also works on a login node. Ctrl-C ends "
        "it; the runs continue.",
        quiet,
        epilog="exit codes: 0 success; 1 error; 2 invalid options or folders",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="Folder of a run, which may not exist yet"
    )
    parser.text("--port", "N", "Port of the page; default: a free port", type=PORT, default=0)
    parser.text(
        "--host",
        "ADDRESS",
        "Address on which to listen, such as 0.0.0.0 for all; default: 127.0.0.1, for this host "
        "only",
        default=address.LOOPBACK,
    )
    parser.text(
        "--allow-host",
        "NAME,NAME,...",
        "Further host names in the URL of the page, for example the name of a proxy; IP addresses, "
        "localhost and the names of this computer are always accepted",
        type=address.host_names,
        default=(),
    )
    return parser.parse(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError("monitor uses one process: run it without mpirun")
    address.need_bokeh("mpidl.monitor")
    runs = runs_of(parsed.runs)
    page = address.listen(parsed.host, parsed.port)
    from mpidl.report.live.server import MonitorServer  # imports Bokeh, which takes a second

    server = MonitorServer(runs, [page.listener], page.token, (parsed.host, *parsed.allow_host))
    for line in page.lines():
        print(line)
    print("Press Ctrl-C to end the monitor; the runs continue.", flush=True)
    server.run()
    return 0
