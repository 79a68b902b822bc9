"""Reports as lines of a file: `report_to="file:measurements.jsonl"`.

Each line is the JSON body of a `POST /v1/runs/{run}/blocks`, with the run's name beside it as
`run_name`, so a file can be read without noisescale and sent to a server later.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from noisescale.wire import BlocksReport, check_schema_version


class JsonlWriter:
    """Appends one line per report; what it is given as `deliver` to a BackgroundSink.

    Args:
        path: Of the file; made with its folders at the first report, appended to if it exists.
        run: The run's name, written into each line.
    """

    def __init__(self, path: str | Path, *, run: str) -> None:
        self.path = Path(path)
        self.run = run

    def __call__(self, report: BlocksReport) -> None:
        """Write one report.

        Raises:
            OSError: The file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"run_name": self.run, **report.model_dump(mode="json")}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def read_reports(path: str | Path) -> Iterator[tuple[str, BlocksReport]]:
    """Each report of a file with its run's name, in the order written.

    Raises:
        SchemaVersionError: A line is from a newer version of noisescale.
    """
    with Path(path).open(encoding="utf-8") as file:
        for line in file:
            fields = json.loads(line)
            check_schema_version(int(fields["schema_version"]))
            yield str(fields["run_name"]), BlocksReport.model_validate(fields)
