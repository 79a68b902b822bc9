"""Whether the server stays as it is: memory, files and sockets over a long time at half load.

    python -m tests.benchmarks.soak --help

Reports come in at a fixed rate over kept-open connections, and /metrics is scraped meanwhile, each time over
a connection of its own. The first minute is warm-up, in which caches fill. Then what the process holds is
looked at every two seconds; the table has the medians of each tenth of the time.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from tests.benchmarks.ingest import fill
from tests.benchmarks.load import run_load, send_for
from tests.benchmarks.peers import DATABASES, running_on
from tests.benchmarks.scrape import timed
from tests.benchmarks.tables import print_table
from tests.benchmarks.traffic import Reports
from tests.services import Server

LOOK_S, SCRAPE_S, PARTS = 2.0, 15.0, 10


@dataclass(frozen=True)
class Held:
    """What the server's process holds at one moment.

    Attributes:
        at_s: Seconds after the warm-up.
        memory_mb: Resident, of the process and its children.
    """

    at_s: float
    memory_mb: float
    files: int
    sockets: int
    threads: int

    @classmethod
    def by(cls, process: psutil.Process, *, at_s: float) -> "Held":
        """Look at a process now."""
        of_all = [process, *process.children(recursive=True)]
        sockets = sum(len(one.net_connections()) for one in of_all)
        return cls(
            at_s,
            sum(one.memory_info().rss for one in of_all) / 2**20,
            sum(one.num_fds() for one in of_all) - sockets,
            sockets,
            sum(one.num_threads() for one in of_all),
        )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--database", choices=DATABASES, default="sqlite", help="(default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="after the warm-up (default: %(default)s)")
    parser.add_argument("--warm-up", type=float, default=60, help="seconds (default: %(default)s)")
    parser.add_argument("--per-second", type=float, default=500, help="reports (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=200, help="that report (default: %(default)s)")
    parser.add_argument("--connections", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=20, help="in a report (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, running_on(args.database, Path(name)) as server:
        soak(server, args)


def soak(server: Server, args: argparse.Namespace) -> None:
    """Load the server, look at it, and print what was seen."""
    fill(server, args.runs)
    reports = Reports(args.runs, args.connections, blocks=args.blocks, sent=1)
    process = psutil.Process(server.process.pid)
    seen: list[Held] = []
    scrapes: list[float] = []

    async def look() -> None:
        started = time.perf_counter()
        scraped_at = started
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.perf_counter()
            if now - scraped_at >= SCRAPE_S:
                scraped_at = now
                scrapes.append((await asyncio.to_thread(timed, f"{server.url}/metrics"))[0])
            held = await asyncio.to_thread(Held.by, process, at_s=now - started - args.warm_up)
            if held.at_s >= 0:
                seen.append(held)

    load = run_load(
        send_for(
            60 * args.minutes,
            reports.next_request,
            port=server.port,
            connections=args.connections,
            warm_up_s=args.warm_up,
            per_second=args.per_second,
            meanwhile=look,
        )
    )
    if len(seen) < PARTS:
        raise SystemExit(f"{len(seen)} looks are too few to compare; give more --minutes")
    parts = [seen[len(seen) * part // PARTS : len(seen) * (part + 1) // PARTS] for part in range(PARTS)]
    print_table(["soak, minutes", "memory, MB", "files", "sockets", "threads"], [row(part) for part in parts])
    first, last = (median([held.memory_mb for held in part]) for part in (parts[0], parts[-1]))
    print_table(
        [args.database, "requests/s", "p99, ms", "errors", "scrape p50, ms", "memory, last / first"],
        [
            [
                f"{args.runs} runs",
                f"{load.per_second:.0f}",
                f"{load.quantile_ms(0.99):.1f}",
                str(load.bad),
                f"{1e3 * median(scrapes):.0f}" if scrapes else "",
                f"{last / first:.3f}",
            ]
        ],
    )


def row(part: Sequence[Held]) -> list[str]:
    """Medians over a part of the time."""
    return [
        f"{part[0].at_s / 60:.1f} to {part[-1].at_s / 60:.1f}",
        f"{median([held.memory_mb for held in part]):.0f}",
        f"{median([held.files for held in part]):.0f}",
        f"{median([held.sockets for held in part]):.0f}",
        f"{median([held.threads for held in part]):.0f}",
    ]


if __name__ == "__main__":
    main()
