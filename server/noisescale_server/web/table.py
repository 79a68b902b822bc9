"""A run's series as CSV: every block, nothing left out."""

import csv
import io
from collections.abc import Iterator

from noisescale.blocks import Geometry
from noisescale_server.web.history import History

COLUMNS = (
    "step",
    "examples",
    "noise_scale",
    "lower",
    "upper",
    "trace_covariance",
    "true_grad_sq_norm",
    "global_batch_size",
    "learning_rate",
)
"""As in GET /v1/runs/{run}/series; an empty field is a value that is not known."""

_ROWS_AT_ONCE = 200


def csv_of(history: History, *, group: str, geometry: Geometry) -> Iterator[str]:
    """The table, a piece at a time."""
    trailing = history.trailing(group=group, geometry=geometry)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for index, block in enumerate(history.blocks):
        found = history.estimate_at(index, trailing[index], group, geometry)
        writer.writerow(
            "" if value is None else value
            for value in (
                block.last_step,
                history.examples[index],
                found.noise_scale,
                found.lower,
                found.upper,
                found.trace_covariance,
                found.true_grad_sq_norm,
                block.global_batch_size,
                block.learning_rate,
            )
        )
        if index % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
            yield out.getvalue()
            out.seek(0)
            out.truncate()
    yield out.getvalue()
