"""The server's own health, per process, at /metrics/process."""

from importlib.metadata import version

from prometheus_client import (
    GC_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
)

_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

_MOST_BAD_RUNS_NAMED = 100


class ProcessMetrics:
    """Counters of one server process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(GC_COLLECTOR)
        self.requests = Counter(
            "noisescale_server_requests",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "noisescale_server_request_seconds",
            "Time from a request's start to its answer's end.",
            ["route"],
            buckets=_LATENCIES,
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "noisescale_server_ingest_queue_depth",
            "Reports that wait for a commit.",
            registry=self.registry,
        )
        self.commit_seconds = Histogram(
            "noisescale_server_commit_seconds",
            "Time of one transaction that stores reports.",
            buckets=_LATENCIES,
            registry=self.registry,
        )
        self.commit_reports = Histogram(
            "noisescale_server_commit_reports",
            "Reports that one transaction stored.",
            buckets=_SIZES,
            registry=self.registry,
        )
        self.failed_commits = Counter(
            "noisescale_server_failed_commits",
            "Transactions that the database refused; their senders were told to try again.",
            registry=self.registry,
        )
        self.blocks = Counter(
            "noisescale_server_blocks",
            "Blocks received, stored or left out as duplicates.",
            ["result"],
            registry=self.registry,
        )
        self.merged_blocks = Counter(
            "noisescale_server_merged_blocks",
            "Old blocks that are no more because they were merged into others.",
            registry=self.registry,
        )
        self.purged_runs = Counter(
            "noisescale_server_purged_runs",
            "Runs that were removed because nothing was reported on them for NOISESCALE_RETENTION_DAYS.",
            registry=self.registry,
        )
        self.retention_failures = Counter(
            "noisescale_server_retention_failures",
            "Rounds of merging and purging that were given up; the next one goes on.",
            registry=self.registry,
        )
        self.bad_runs = Counter(
            "noisescale_server_bad_runs",
            "Times a run was left out of an answer because its data could not be evaluated.",
            registry=self.registry,
        )
        self.run_left_out = Counter(
            "noisescale_server_run_left_out",
            "The same, by run; not there before the first time.",
            ["run_id"],
            registry=self.registry,
        )
        self._bad_runs_named: set[str] = set()
        Info("noisescale_server_build", "Version of this server.", registry=self.registry).info(
            {"version": version("noisescale")}
        )

    def count_bad_run(self, run: str) -> None:
        """Count a run that was left out; by name, as long as there are not too many of them."""
        if run not in self._bad_runs_named:
            if len(self._bad_runs_named) >= _MOST_BAD_RUNS_NAMED:
                run = "other"
            else:
                self._bad_runs_named.add(run)
        self.bad_runs.inc()
        self.run_left_out.labels(run).inc()
