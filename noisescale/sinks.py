"""Where measured blocks go: anything with `report`, `flush` and `close`."""

from typing import Protocol

from noisescale.wire import BlocksReport


class Sink(Protocol):
    """Takes reports on the training thread. Never blocks there and never raises."""

    def report(self, report: BlocksReport) -> None:
        """Take one report in; delivered later, on another thread."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was taken in is delivered; whether it was, in time."""

    def close(self, timeout_s: float) -> bool:
        """Flush and stop; later reports are dropped and counted."""
