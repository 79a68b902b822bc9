"""The Service dashboard: the health of the server's own processes, each replica by itself."""

from grafana_foundation_sdk.builders import dashboard, stat, timeseries
from panels import BLUE, GREEN, GREY, RED, base, fixed, label_variable, lines, number, query

UID = "noisescale-service"
PROCESS = 'instance=~"$instance"'
RATE = "$__rate_interval"
ACCEPTED = 'result="accepted"'


def build() -> dashboard.Dashboard:
    """The dashboard, to be written as JSON."""
    board = base(
        "noisescale / Service",
        uid=UID,
        description="The server's own health, from /metrics/process of every replica.",
        variables=[
            label_variable(
                "instance",
                label="Replicas",
                values_of="label_values(noisescale_server_build_info, instance)",
                multi=True,
                description="Server processes, by the address they are scraped at.",
            )
        ],
    )
    for panel in (*numbers(), *requests(), *commits(), *processes()):
        board = board.with_panel(panel)
    return board


def rate(metric: str, selector: str = "") -> str:
    """PromQL for the growth per second of a counter of the server's."""
    chosen = ", ".join(filter(None, [PROCESS, selector]))
    return f"rate({metric}{{{chosen}}}[{RATE}])"


def quantile(share: float, metric: str, *, by: str) -> str:
    """PromQL for a quantile of a histogram."""
    return f"histogram_quantile({share}, sum by (le, {by}) ({rate(metric + '_bucket')}))"


def numbers() -> list[stat.Panel]:
    """The first row: is it well, now."""
    failing = rate("noisescale_server_requests_total", 'status=~"5.."')
    return [
        number(
            "Replicas up",
            f"count(noisescale_server_build_info{{{PROCESS}}})",
            description="Processes that answered the last scrape.",
            colour=GREEN,
        ),
        number(
            "Reports per second",
            f"sum({rate('noisescale_server_commit_reports_sum')})",
            description="Stored and acknowledged.",
            decimals=1,
        ),
        number(
            "Blocks per second",
            f"sum({rate('noisescale_server_blocks_total', ACCEPTED)})",
            description="Stored; one sent twice counts once.",
            decimals=1,
        ),
        number(
            "Reports waiting",
            f"sum(noisescale_server_ingest_queue_depth{{{PROCESS}}})",
            description="For a commit. A queue that stays long means the database cannot keep up.",
        ),
        number(
            "Answers that failed",
            f"(sum({failing}) or vector(0)) / sum({rate('noisescale_server_requests_total')})",
            description="Share of answers with a 5xx status, 503 of a full queue included.",
            unit="percentunit",
            decimals=2,
            colour=RED,
        ),
        number(
            "Version",
            f"count by (version) (noisescale_server_build_info{{{PROCESS}}})",
            description="More than one while an upgrade is under way.",
            legend="{{version}}",
            name_only=True,
            colour=GREY,
        ),
    ]


def requests() -> list[timeseries.Panel]:
    """What is asked, how fast it is answered, and how often not."""
    return [
        lines(
            "Requests per second, by route",
            [
                query(
                    f"sum by (method, route) ({rate('noisescale_server_requests_total')})",
                    "{{method}} {{route}}",
                )
            ],
            description="Answered, whatever the status.",
            unit="reqps",
        ).min(0),
        lines(
            "Answers per second, by status",
            [query(f"sum by (status) ({rate('noisescale_server_requests_total')})", "{{status}}")],
            description=(
                "401 and 403 are wrong tokens, 422 is a report that was refused, 503 a queue that is full"
                " or a database that is away."
            ),
            unit="reqps",
        ).min(0),
        lines(
            "Time to answer, 99th percentile, by route",
            [query(quantile(0.99, "noisescale_server_request_seconds", by="route"), "{{route}}")],
            description="A report is answered after its commit.",
            unit="s",
            log=True,
        ),
        lines(
            "Time to answer a scrape",
            [
                query(
                    'max by (job, instance) (scrape_duration_seconds{job=~"noisescale.*"})',
                    "{{job}} {{instance}}",
                )
            ],
            description="As Prometheus sees it. Keep it well under the scrape timeout.",
            unit="s",
        ).min(0),
    ]


def commits() -> list[timeseries.Panel]:
    """The group commit: what waits, how long a transaction takes, how much it stores."""
    return [
        lines(
            "Reports waiting",
            [query(f"max by (instance) (noisescale_server_ingest_queue_depth{{{PROCESS}}})", "{{instance}}")],
            description=(
                "NOISESCALE_INGEST_QUEUE_SIZE is the most; then reports are answered 503 and sent again."
            ),
        ).min(0),
        lines(
            "Time of a commit",
            [
                query(
                    quantile(0.5, "noisescale_server_commit_seconds", by="instance"), "median {{instance}}"
                ),
                query(
                    quantile(0.99, "noisescale_server_commit_seconds", by="instance"),
                    "99% {{instance}}",
                    ref="B",
                ),
            ],
            description="One transaction that stores the reports that waited.",
            unit="s",
            log=True,
        ),
        lines(
            "Reports in a commit",
            [
                query(
                    f"sum by (instance) ({rate('noisescale_server_commit_reports_sum')}) "
                    f"/ sum by (instance) ({rate('noisescale_server_commit_reports_count')})",
                    "{{instance}}",
                )
            ],
            description="Mean. It grows with the load: that is how the load is borne.",
        ).min(0),
        lines(
            "Blocks, failed commits, bad runs",
            [
                query(f"sum by (result) ({rate('noisescale_server_blocks_total')})", "blocks {{result}}"),
                query(f"sum({rate('noisescale_server_failed_commits_total')})", "failed commits", ref="B"),
                query(f"sum({rate('noisescale_server_bad_runs_total')})", "bad runs left out", ref="C"),
            ],
            description=(
                "Duplicates are retries and cost nothing. Failed commits and bad runs are in the log."
            ),
            unit="ops",
        )
        .override_by_name("failed commits", [fixed(RED)])
        .min(0),
    ]


def processes() -> list[timeseries.Panel]:
    """The process: memory, processor, files."""
    return [
        lines(
            "Memory",
            [query(f"process_resident_memory_bytes{{{PROCESS}}}", "{{instance}}")],
            description="Resident. It grows with the number of live runs and then stays flat.",
            unit="bytes",
            width=8,
        ).min(0),
        lines(
            "Processor",
            [query(f"rate(process_cpu_seconds_total{{{PROCESS}}}[{RATE}])", "{{instance}}")],
            description=(
                "Cores in use. One process uses one core at most, so add replicas before it reaches 1."
            ),
            unit="short",
            width=8,
        ).min(0),
        lines(
            "Open files",
            [
                query(f"process_open_fds{{{PROCESS}}}", "{{instance}}"),
                query(f"min(process_max_fds{{{PROCESS}}})", "limit", ref="B"),
            ],
            description="Sockets included.",
            width=8,
            log=True,
        ).override_by_name("limit", [fixed(BLUE)]),
    ]
