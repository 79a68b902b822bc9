"""What a person takes away from a page: CSV, PNG, PromQL."""

import csv
import html
import io
import re
import struct
from pathlib import Path

from playwright.sync_api import BrowserContext

from tests.services import Server, running_prometheus, wait_until
from tests.web.browser import until, visit, wait_for_charts


def test_csv_is_downloaded(server: Server, desktop: BrowserContext) -> None:
    """A link to every block of the run, under the run's name; it is the API's series."""
    with visit(desktop, server.url + "/runs/digits") as visited:
        with visited.page.expect_download() as download:
            visited.page.click("#figure-noise_scale >> text=CSV")
        assert download.value.suggested_filename == "digits-total-euclidean.csv"
        rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    points = server.get("/v1/runs/digits/series?max_points=2000").json()["points"]
    assert len(rows) == len(points) > 10
    for row, point in zip(rows, points, strict=True):
        for name, value in point.items():
            assert (float(row[name]) if row[name] else None) == (value if value is None else float(value))


def test_png_is_downloaded(server: Server, desktop: BrowserContext) -> None:
    """A picture of 2,400 by 1,240 pixels, under the run's and the chart's names."""
    with visit(desktop, server.url + "/runs/digits") as visited:
        wait_for_charts(visited.page)
        with visited.page.expect_download() as download:
            visited.page.click("#figure-noise_scale >> text=PNG")
        assert download.value.suggested_filename == "digits-noise_scale.png"
        content = Path(download.value.path()).read_bytes()
        assert visited.complaints == []
    assert content.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", content[16:24]) == (2400, 1240)


def test_promql_is_copied(server: Server, desktop: BrowserContext) -> None:
    """One press puts a chart's queries into the clipboard."""
    desktop.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    with visit(desktop, server.url + "/runs/digits") as visited:
        page = visited.page
        page.click("#figure-noise_scale .promql summary")
        page.click("#figure-noise_scale .promql button")
        until(page, "document.querySelector('#figure-noise_scale .promql button').textContent === 'Copied'")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == page.locator("#promql-noise_scale").text_content()
        assert 'run_id="digits"' in copied


def test_prometheus_answers_every_query(server: Server, tmp_path: Path) -> None:
    """Each query of each chart gives data in a Prometheus that scraped this server."""
    run, other = "resnet50-8gpu", "gpt-124m.adamw"
    with running_prometheus(server.url, folder=tmp_path) as prometheus:
        wait_until(lambda: prometheus.query("noisescale_noise_scale"), what="the scrape")
        for path, least in ((f"/runs/{run}", 11), (f"/compare?run={run}&run={other}", 3)):
            queries = _queries(server.get(path).text)
            assert len(queries) >= least
            assert [query for query in queries if not prometheus.query(query)] == []
        names = {found["metric"]["run_id"] for query in queries[:-1] for found in prometheus.query(query)}
        assert names == {run, other}


def _queries(page: str) -> list[str]:
    """What a page offers to copy."""
    found = re.findall(r'<pre id="promql-[^>]*>(.*?)</pre>', page, flags=re.DOTALL)
    return [query for text in found for query in html.unescape(text).splitlines()]
