"""How long /metrics takes, beside prometheus-pushgateway with the same series, and what it does to ingest.

    python -m tests.benchmarks.scrape --help

"same" is a scrape of runs that did not report since the last one; "changed" one before which every run
reported again, so that every estimate and every advice is worked out anew (a pushgateway works out nothing).
The last table is ingest over a few connections while a scraper asks every second.
"""

import argparse
import asyncio
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.ingest import FILLING_CONNECTIONS, one_run_pushed, send_each
from tests.benchmarks.load import Load, run_load, send_for
from tests.benchmarks.peers import DATABASES, cpu_seconds, running_on, running_pushgateway
from tests.benchmarks.tables import print_table
from tests.benchmarks.traffic import Pushes, Reports
from tests.services import Server, http

_FILLED_REPORTS = 5
"""Reports of 20 blocks that every run has sent before: as many steps as an estimate looks back over."""

_TEXT = {"Accept": "text/plain;version=0.0.4"}


@dataclass
class Row:
    """Scrapes of one server."""

    what: str
    runs: int
    series: int
    size: int
    same_s: list[float]
    changed_s: list[float]
    cpu_s: float

    @property
    def same_ms(self) -> float:
        """The median where no run reported."""
        return 1e3 * _median(self.same_s)

    @property
    def cells(self) -> list[str]:
        """As the table shows it."""
        return [
            self.what,
            str(self.runs),
            str(self.series),
            f"{self.size / 1e6:.1f}",
            f"{self.same_ms:.0f}",
            f"{1e3 * max(self.same_s):.0f}",
            f"{1e3 * self.cpu_s / len(self.same_s):.0f}",
            f"{1e3 * _median(self.changed_s):.0f}" if self.changed_s else "",
        ]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--databases", nargs="+", choices=DATABASES, default=list(DATABASES))
    parser.add_argument("--runs", nargs="+", type=int, default=[100, 1000, 5000], help="live runs")
    parser.add_argument("--scrapes", type=int, default=15, help="of each kind (default: %(default)s)")
    parser.add_argument(
        "--connections", type=int, default=8, help="that report while it is scraped (default: %(default)s)"
    )
    parser.add_argument(
        "--beside-runs", type=int, default=1000, help="live runs meanwhile (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=15, help="of ingest beside scrapes (default: %(default)s)"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave the pushgateway out")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for database in args.databases:
            rows += [ours(database, runs, folder / f"{database}-{runs}", args) for runs in args.runs]
        if not args.no_peer:
            series = one_run_pushed(folder / "form")
            rows += [theirs(series, runs, args) for runs in args.runs]
        head = [
            "scrape",
            "runs",
            "series",
            "MB",
            "p50 same, ms",
            "max same, ms",
            "CPU, ms",
            "p50 changed, ms",
        ]
        print_table(head, [row.cells for row in rows])
        print_table(["p50 same, ratio", *(f"{runs} runs" for runs in args.runs)], ratios(rows, args.runs))
        print_table(
            [
                "ingest while scraped every second",
                "runs",
                "requests/s",
                "p50, ms",
                "p99, ms",
                "scrape p50, ms",
            ],
            [beside(database, folder / f"beside-{database}", args) for database in args.databases],
        )


def ours(database: str, runs: int, folder: Path, args: argparse.Namespace) -> Row:
    """Our server with so many live runs."""
    with running_on(database, folder, grace_s=3600) as server:
        reports = filled(server, runs)

        def all_report() -> None:
            send_each(reports.next_request, runs, port=server.port)

        what = f"noisescale, {database}"
        row = scraped(what, runs, f"{server.url}/metrics", server.process, count=args.scrapes)
        for _ in range(min(3, args.scrapes)):
            all_report()
            row.changed_s.append(timed(f"{server.url}/metrics")[0])
        return row


def filled(server: Server, runs: int) -> Reports:
    """Make the runs known with as many steps as an estimate needs; what they send next."""
    reports = Reports(runs, FILLING_CONNECTIONS)
    for _ in range(_FILLED_REPORTS):
        send_each(reports.next_request, runs, port=server.port)
    return reports


def theirs(series: bytes, runs: int, args: argparse.Namespace) -> Row:
    """A pushgateway with the same runs as groups."""
    with running_pushgateway(checks=False) as (port, process):
        send_each(Pushes(series, groups=runs, connections=FILLING_CONNECTIONS).next_request, runs, port=port)
        return scraped("pushgateway", runs, f"http://127.0.0.1:{port}/metrics", process, count=args.scrapes)


def scraped(what: str, runs: int, url: str, process: "subprocess.Popen[bytes]", *, count: int) -> Row:
    """Scrapes one after the other, after one that is not counted."""
    _, page = timed(url)
    series = sum(line[:1] not in (b"#", b"") for line in page.split(b"\n"))
    cpu_before = cpu_seconds(process)
    same = [timed(url)[0] for _ in range(count)]
    return Row(what, runs, series, len(page), same, [], cpu_seconds(process) - cpu_before)


def timed(url: str) -> tuple[float, bytes]:
    """Seconds that a scrape takes, and the page."""
    started = time.perf_counter()
    answer = http("GET", url, headers=_TEXT)
    seconds = time.perf_counter() - started
    assert answer.status == 200, answer.text
    return seconds, answer.body


def ratios(rows: list[Row], counts: list[int]) -> list[list[str]]:
    """Our medians over the pushgateway's."""
    found = {(row.what, row.runs): row.same_ms for row in rows}
    return [
        [f"{name} / pushgateway", *(f"{found[name, n] / found['pushgateway', n]:.2f}" for n in counts)]
        for name in dict.fromkeys(row.what for row in rows)
        if name != "pushgateway" and ("pushgateway", counts[0]) in found
    ]


def beside(database: str, folder: Path, args: argparse.Namespace) -> list[str]:
    """Ingest while it is scraped."""
    scrapes: list[float] = []
    with running_on(database, folder, grace_s=3600) as server:
        filled(server, args.beside_runs)
        timed(f"{server.url}/metrics")  # it has been scraped all the time
        reports = Reports(args.beside_runs, args.connections, sent=_FILLED_REPORTS)

        async def scrape() -> None:
            while True:
                started = time.perf_counter()
                seconds, _ = await asyncio.to_thread(timed, f"{server.url}/metrics")
                scrapes.append(seconds)
                await asyncio.sleep(max(0.0, 1.0 - (time.perf_counter() - started)))

        load: Load = run_load(
            send_for(
                args.seconds,
                reports.next_request,
                port=server.port,
                connections=args.connections,
                warm_up_s=2,
                meanwhile=scrape,
            )
        )
    assert load.bad == 0, load.statuses
    return [
        f"noisescale, {database}",
        str(args.beside_runs),
        f"{load.per_second:.0f}",
        f"{load.quantile_ms(0.5):.1f}",
        f"{load.quantile_ms(0.99):.1f}",
        f"{1e3 * _median(scrapes):.0f}",
    ]


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


if __name__ == "__main__":
    main()
