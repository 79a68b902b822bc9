"""One line on a run, as the list of runs has it."""

import time

from noisescale.wire import RunSummary
from noisescale_server.services import Services
from noisescale_server.standing import Standing, state_of
from noisescale_server.store import StoredRun


def summary_of(run: StoredRun, standing: Standing, services: Services) -> RunSummary:
    """One line of the list."""
    total, advice = standing.total, standing.recommendation
    return RunSummary(
        run=run.name,
        state=state_of(run, now=time.time(), grace_s=services.settings.grace_s),
        batch_unit=total.batch_unit if total else "examples",
        noise_scale=total.noise_scale if total else None,
        lower=total.lower if total else None,
        upper=total.upper if total else None,
        global_batch_size=standing.global_batch_size,
        learning_rate=standing.learning_rate,
        action=advice.action if advice else None,
        reason=advice.reason if advice else None,
        last_step=run.last_step,
        measured_steps=run.measured_steps,
        last_report_at=run.last_report_at,
    )
