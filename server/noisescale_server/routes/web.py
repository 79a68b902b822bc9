"""`/`: a page that lists the runs, for a browser."""

import html
import time

from fastapi import APIRouter, Response

from noisescale.explain import number
from noisescale.wire import RunSummary
from noisescale_server.routes.runs import summary_of
from noisescale_server.services import Reader

router = APIRouter(include_in_schema=False)

_LISTED = 200
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>noisescale</title>
<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="10">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: .4rem .8rem .4rem 0; white-space: nowrap; }}
tr {{ border-bottom: 1px solid #8884; }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
</style></head><body>
<h1>noisescale</h1>
<p>Is the batch right, and the learning rate? Also here:
<a href="/docs">the API</a>, <a href="/metrics">metrics for Prometheus</a>.</p>
<div class="wide"><table><thead><tr><th>Run</th><th>State</th><th class="n">Noise scale</th>
<th class="n">95% interval</th>
<th class="n">Batch</th><th>Advice</th><th>Last report</th></tr></thead><tbody>
{rows}
</tbody></table></div></body></html>
"""


@router.get("/")
async def get_page(services: Reader) -> Response:
    """Every run on one line, with a link to its advice."""
    runs = await services.standings.of_all(await services.store.runs(limit=_LISTED))
    rows = [_row(summary_of(run, standing, services)) for run, standing in runs]
    empty = '<tr><td colspan="7">No run has reported yet.</td></tr>'
    return Response(_PAGE.format(rows="\n".join(rows) or empty), media_type="text/html")


def _row(run: RunSummary) -> str:
    def shown(value: float | None) -> str:
        return "&ndash;" if value is None else number(value)

    upper = "unbounded" if run.upper is None else number(run.upper)
    interval = "&ndash;" if run.lower is None else f"{number(run.lower)} to {upper}"
    name = html.escape(run.run)
    advice = html.escape(f"{run.action} ({run.reason})" if run.action else "none yet")
    ago = max(0, round(time.time() - run.last_report_at))
    return (
        f'<tr><td><a href="/v1/runs/{name}">{name}</a></td><td>{run.state}</td>'
        f'<td class="n">{shown(run.noise_scale)}</td><td class="n">{interval}</td>'
        f'<td class="n">{shown(run.global_batch_size)}</td>'
        f'<td><a href="/recommend?run={name}">{advice}</a></td><td>{ago} s ago</td></tr>'
    )
