"""How many reports the server takes in, beside prometheus-pushgateway on the same machine in the same run.

    python -m tests.benchmarks.ingest --help

64 connections are kept open; each sends its next report when the last one is answered, which is after the
commit. A report has 20 blocks of 10 steps. A pushgateway is pushed the same runs' series, one group a run;
it keeps them in memory. What a request costs the server in processor time is told beside the rates, since
that is the same whatever else the machine does.
"""

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.load import Load, NextRequest, run_load, send_for
from tests.benchmarks.peers import DATABASES, cpu_seconds, running_on, running_pushgateway
from tests.benchmarks.tables import print_table
from tests.benchmarks.traffic import Pushes, Reports, pushed_form
from tests.services import Server, running_server

FILLING_CONNECTIONS = 16


@dataclass
class Row:
    """One measurement."""

    what: str
    runs: int
    load: Load
    cpu_s: float

    @property
    def cells(self) -> list[str]:
        """As the table shows it."""
        return [
            self.what,
            str(self.runs),
            f"{self.load.per_second:.0f}",
            f"{self.load.quantile_ms(0.5):.1f}",
            f"{self.load.quantile_ms(0.99):.1f}",
            f"{1e3 * self.cpu_s / max(1, self.load.good):.2f}",
            str(self.load.bad),
        ]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    parser.add_argument("--runs", nargs="+", type=int, default=[100, 1000, 5000], help="known runs")
    parser.add_argument("--connections", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=20, help="in a report (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="of each row (default: %(default)s)")
    parser.add_argument("--warm-up", type=float, default=2, help="seconds not counted (default: %(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="leave the pushgateway out")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for database in args.databases:
            rows += [ours(database, runs, folder / f"{database}-{runs}", args) for runs in args.runs]
        if not args.no_peer:
            series = one_run_pushed(folder / "form")
            rows += [theirs(series, runs, folder / f"{runs}.pushed", args) for runs in args.runs]
    head = ["ingest", "runs", "requests/s", "p50, ms", "p99, ms", "CPU ms/request", "errors"]
    print_table(head, [row.cells for row in rows])
    print_table(["ratio of rates", *(f"{runs} runs" for runs in args.runs)], ratios(rows, args.runs))


def ours(database: str, runs: int, folder: Path, args: argparse.Namespace) -> Row:
    """Our server, with so many runs known."""
    with running_on(database, folder) as server:
        fill(server, runs)
        reports = Reports(runs, args.connections, blocks=args.blocks, sent=1)
        what = f"noisescale, {database}"
        return measured(what, runs, reports.next_request, server.port, server.process, args)


def fill(server: Server, runs: int) -> None:
    """Make every run known, with one report each."""
    send_each(Reports(runs, FILLING_CONNECTIONS).next_request, runs, port=server.port)


def send_each(next_request: NextRequest, runs: int, *, port: int) -> None:
    """Send one request for every run."""
    left = [len(range(connection, runs, FILLING_CONNECTIONS)) for connection in range(FILLING_CONNECTIONS)]

    def next_or_none(connection: int) -> bytes | None:
        left[connection] -= 1
        return next_request(connection) if left[connection] >= 0 else None

    load = run_load(send_for(600, next_or_none, port=port, connections=FILLING_CONNECTIONS))
    assert load.good == runs, load.statuses


def one_run_pushed(folder: Path) -> bytes:
    """What a job would push of one run to show as many series as our server does."""
    with running_server(folder) as server:
        assert server.post("/v1/runs/form/blocks", Reports(1, 1).body(0)).status == 200
        return pushed_form(server, "form")


def theirs(series: bytes, runs: int, kept: Path, args: argparse.Namespace) -> Row:
    """The pushgateway as it is by default, with so many groups.

    It is filled by one that makes no check, since each checked push takes the longer the more there are.
    """
    with running_pushgateway(kept=kept, checks=False) as (port, _):
        send_each(Pushes(series, groups=runs, connections=FILLING_CONNECTIONS).next_request, runs, port=port)
    with running_pushgateway(kept=kept) as (port, process):
        pushes = Pushes(series, groups=runs, connections=args.connections)
        return measured("pushgateway", runs, pushes.next_request, port, process, args)


def measured(
    what: str,
    runs: int,
    next_request: NextRequest,
    port: int,
    process: "subprocess.Popen[bytes]",
    args: argparse.Namespace,
) -> Row:
    """A short warm-up that is not counted, then the load."""
    cpu_before: list[float] = []
    load = run_load(
        send_for(
            args.seconds,
            next_request,
            port=port,
            connections=args.connections,
            warm_up_s=args.warm_up,
            begun=lambda: cpu_before.append(cpu_seconds(process)),
        )
    )
    return Row(what, runs, load, cpu_seconds(process) - cpu_before[0])


def ratios(rows: list[Row], counts: list[int]) -> list[list[str]]:
    """Our rates over the pushgateway's, and over our own at the fewest runs."""
    rates = {(row.what, row.runs): row.load.per_second for row in rows}
    names = list(dict.fromkeys(row.what for row in rows if row.what != "pushgateway"))
    found = [
        [f"{name} / pushgateway", *(f"{rates[name, n] / rates['pushgateway', n]:.1f}" for n in counts)]
        for name in names
        if ("pushgateway", counts[0]) in rates
    ]
    return found + [
        [
            f"{name} / the same at {counts[0]}",
            *(f"{rates[name, n] / rates[name, counts[0]]:.2f}" for n in counts),
        ]
        for name in names
    ]


if __name__ == "__main__":
    main()
