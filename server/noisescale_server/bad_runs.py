"""Runs whose data cannot be evaluated: counted by name, and logged once for each version."""

import structlog

from noisescale_server.process_metrics import ProcessMetrics
from noisescale_server.store import StoredRun

_log = structlog.get_logger(__name__)
_MOST_REMEMBERED = 1000


class BadRuns:
    """Is told of each run that an answer leaves out, so that the others can be answered."""

    def __init__(self, metrics: ProcessMetrics) -> None:
        self._metrics = metrics
        self._logged: dict[int, int] = {}

    def tell(self, run: StoredRun, error: Exception) -> None:
        """Count a run, and log why it was left out unless that was said already."""
        self._metrics.count_bad_run(run.name)
        if self._logged.get(run.id) == run.version:
            return
        if len(self._logged) >= _MOST_REMEMBERED:
            self._logged.clear()
        self._logged[run.id] = run.version
        _log.error("run left out", run=run.name, error=f"{type(error).__name__}: {error}"[:500])
