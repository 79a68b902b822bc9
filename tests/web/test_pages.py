"""Every page in a real Chromium, on runs that a real server was told of, one by a real job."""

import pytest
from playwright.sync_api import BrowserContext

from tests.server.reports import report
from tests.services import Server
from tests.web.browser import DRAWING, serious_violations, until, visit, wait_for_charts
from tests.web.conftest import REAL_STEPS
from tests.web.seeded import constant, info, made_blocks, send

ON_A_PHONE = [
    "/",
    "/runs/resnet50-8gpu",
    "/runs/waiting",
    "/compare?run=resnet50-8gpu&run=digits&run=vit-small.too-big",
    "/plan?run=digits&target_dp_world_size=16",
]
PAGES = [
    *ON_A_PHONE,
    "/?q=no-such-run",
    "/runs/digits",
    "/runs/gpt-124m.adamw",
    "/compare",
    "/plan",
    "/sign-in",
]


@pytest.mark.parametrize(
    ("window", "path"),
    [("desktop", path) for path in PAGES] + [("phone", path) for path in ON_A_PHONE],
)
def test_page_renders_and_is_accessible(
    server: Server, path: str, window: str, request: pytest.FixtureRequest
) -> None:
    """No complaint of any kind, nothing wider than the screen, and axe finds nothing serious.

    On a light desktop and a dark phone.
    """
    context: BrowserContext = request.getfixturevalue(window)
    with visit(context, server.url + path) as visited:
        page = visited.page
        if path.startswith(DRAWING) and path != "/runs/waiting":
            page.wait_for_selector(".plot .main-svg")
        if path.startswith(("/runs/", "/compare?")) and path != "/runs/waiting":
            wait_for_charts(page)
        assert page.locator("h1").count() == 1, page.inner_text("body")
        assert page.title().endswith("noisescale")
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider == 0
        assert serious_violations(page) == []
        assert visited.complaints == []


def test_list_says_what_the_api_says(server: Server, desktop: BrowserContext) -> None:
    """Every run is on a line with its state, batch and advice as a word."""
    words = {"raise": "Raise", "lower": "Lower", "hold": "Hold", "lr_only": "Fix rate", None: "–"}
    with visit(desktop, server.url + "/") as visited:
        for run in server.get("/v1/runs").json()["runs"]:
            row = visited.page.locator(f'tr[data-key="{run["run"]}"]')
            assert row.locator(".state").inner_text() == run["state"]
            assert row.locator(".advice-cell > :first-child").inner_text() == words[run["action"]]
            if run["global_batch_size"]:
                shown = row.locator(".batch-cell .big").inner_text().replace(",", "")
                assert float(shown) == pytest.approx(run["global_batch_size"], rel=1e-3)


def test_list_is_searched_sorted_and_filtered(server: Server, desktop: BrowserContext) -> None:
    """As you type and without a reload; the address carries it, and leads back to it."""
    with visit(desktop, server.url + "/") as visited:
        page = visited.page
        names = "[...document.querySelectorAll('#rows tr')].map(row => row.dataset.key)"
        page.evaluate("window.same = true")
        page.fill("input[type=search]", "gpt")
        until(page, f"{names}.join() === 'gpt-124m.adamw'")
        page.fill("input[type=search]", "")
        until(page, f"{names}.length > 5")
        page.click("thead >> text=Batch")
        until(page, "document.querySelector('th[aria-sort]')?.innerText.startsWith('Batch')")
        shown = page.evaluate(names)
        batches = {r["run"]: r["global_batch_size"] or 0 for r in server.get("/v1/runs").json()["runs"]}
        assert shown == sorted(shown, key=lambda name: -batches[name])
        page.click("text=Ended")
        until(page, f"{names}.includes('vit-small.too-big') && !{names}.includes('waiting')")
        assert page.evaluate("window.same")
        again = page.url
    with visit(desktop, again) as visited:
        assert visited.page.locator(".chip[aria-current]").inner_text().startswith("Ended")
        assert visited.page.locator("th[aria-sort=descending]").inner_text().startswith("Batch")


def test_list_updates_by_itself(server: Server, desktop: BrowserContext) -> None:
    """A run that begins to report appears, and what was ticked stays ticked."""
    with visit(desktop, server.url + "/") as visited:
        page = visited.page
        page.evaluate("window.same = true")
        page.check('input[value="digits"]')
        blocks = made_blocks(
            steps=300, noise_scale=constant(900), batch=constant(64), learning_rate=constant(0.1)
        )
        send(server, "newcomer", blocks, run=info())
        page.wait_for_selector('tr[data-key="newcomer"]')
        assert page.is_checked('input[value="digits"]')
        assert page.evaluate("window.same")
        assert page.inner_text("#compare-button") == "Compare 1"


def test_run_page_updates_by_itself(server: Server, desktop: BrowserContext) -> None:
    """More steps are reported: the number of steps and the charts follow, without a reload."""
    options = {"noise_scale": constant(900), "batch": constant(64), "learning_rate": constant(0.1)}
    send(server, "growing", made_blocks(steps=300, **options), run=info())
    with visit(desktop, server.url + "/runs/growing") as visited:
        page = visited.page
        wait_for_charts(page)
        page.evaluate("window.same = true")
        last = "document.getElementById('plot-noise_scale').data.at(-2).x.at(-1)"
        assert page.evaluate(last) == 300
        send(server, "growing", made_blocks(steps=200, first_step=300, **options), run=info(), seq=1)
        until(page, f"{last} === 500")
        assert "500" in page.inner_text("#stats")
        assert page.evaluate("window.same")
        assert visited.complaints == []


def test_waiting_run_fills_its_page(server: Server, desktop: BrowserContext) -> None:
    """A run without a step says so, and shows its charts when the first ones come."""
    server.post("/v1/runs/late/blocks", report())
    with visit(desktop, server.url + "/runs/late") as visited:
        page = visited.page
        assert "has not measured a step yet" in page.inner_text("#verdict")
        blocks = made_blocks(
            steps=50, noise_scale=constant(900), batch=constant(64), learning_rate=constant(0.1)
        )
        send(server, "late", blocks, run=info(), seq=1)
        wait_for_charts(page)
        assert page.locator("#waiting").count() == 0


def test_run_page_tells_the_advice(server: Server, desktop: BrowserContext) -> None:
    """The explanation, every rule's learning rate and the sources are those of GET /recommend."""
    with visit(desktop, server.url + "/runs/resnet50-8gpu") as visited:
        page = visited.page
        advice = server.get("/recommend?run=resnet50-8gpu").json()
        assert advice["action"] == "raise"
        assert " ".join(page.locator("#why ol li").all_inner_texts()) == advice["explanation"]
        rates = {
            row.get_attribute("data-rule"): float(
                row.locator("[data-value]").get_attribute("data-value") or 0
            )
            for row in page.locator("#rules [data-rule]").all()
        }
        assert rates == advice["rules"]
        chosen = page.locator("#rules tr.chosen").get_attribute("data-rule")
        assert chosen == advice["chosen_rule"]
        listed = page.locator("#why ul").last.locator("li").all_inner_texts()
        assert listed == advice["sources"]


def test_charts_draw_the_data(server: Server, desktop: BrowserContext) -> None:
    """Noise scale and batch are those of the series; changes, restarts and the advice are marked."""
    with visit(desktop, server.url + "/runs/resnet50-8gpu") as visited:
        page = visited.page
        wait_for_charts(page)
        drawn = page.evaluate(
            "(() => { const p = document.getElementById('plot-noise_scale');"
            "return {x: p.data.at(-2).x, y: p.data.at(-2).y, marks: p.data.at(-1).text,"
            "lines: p.layout.shapes.map(s => s.y0)} })()"
        )
        series = server.get("/v1/runs/resnet50-8gpu/series?max_points=2000").json()["points"]
        known = {point["step"] + 1: point["noise_scale"] for point in series}
        assert drawn["x"][-1] == 6000
        for step, value in zip(drawn["x"], drawn["y"], strict=True):
            assert value == pytest.approx(known[step], rel=1e-6)
        assert drawn["marks"] == ["batch 256 → 512", "learning rate 0.1 → 0.16", "attempt 2 starts"]
        assert server.get("/recommend?run=resnet50-8gpu").json()["global_batch_size"] in drawn["lines"]
        page.locator("#groups").scroll_into_view_if_needed()
        until(page, "document.querySelectorAll('#groups .multiple .main-svg').length >= 5")
        assert page.locator("#changes li").count() == 3


@pytest.mark.parametrize("run", ["resnet50-8gpu", "gpt-124m.adamw"])
def test_nothing_is_cut_off(server: Server, desktop: BrowserContext, run: str) -> None:
    """Names at the lines' ends lie within their charts, and the table of rules needs no scrolling."""
    for path in (f"/runs/{run}", f"/plan?run={run}&target_dp_world_size=32"):
        with visit(desktop, server.url + path) as visited:
            until(visited.page, "document.querySelector('.plot .main-svg') !== null")
            cut = visited.page.evaluate(
                "[...document.querySelectorAll('.plot .annotation-text')].filter(name => "
                "name.getBoundingClientRect().right > name.closest('.plot').getBoundingClientRect().right)"
                ".map(name => name.textContent)"
                ".concat([...document.querySelectorAll('table.plain')].filter(table => "
                "table.scrollWidth > table.parentElement.clientWidth).map(table => table.innerText))"
            )
            assert cut == []


def test_charts_of_a_real_job(server: Server, desktop: BrowserContext) -> None:
    """The digits job's every step is on its page."""
    with visit(desktop, server.url + "/runs/digits") as visited:
        wait_for_charts(visited.page)
        last = visited.page.evaluate("document.getElementById('plot-noise_scale').data.at(-2).x.at(-1)")
        assert last == REAL_STEPS
        assert "ended" in visited.page.inner_text("#lead")


def test_axes_change_by_keyboard(server: Server, desktop: BrowserContext) -> None:
    """The first tab leads past the navigation; arrow keys turn steps into examples, linear into log."""
    with visit(desktop, server.url + "/runs/resnet50-8gpu") as visited:
        page = visited.page
        wait_for_charts(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        page.focus("input[name=x][value=step]")
        page.keyboard.press("ArrowRight")
        end = "document.getElementById('plot-noise_scale').data.at(-2).x.at(-1)"
        until(page, f"{end} > 1000000")
        page.focus("input[name=x-scale][value=linear]")
        page.keyboard.press("ArrowRight")
        until(page, "document.getElementById('plot-noise_scale').layout.xaxis.type === 'log'")
        page.focus("#figure-noise_scale [data-table] summary")
        page.keyboard.press("Enter")
        page.wait_for_selector("#figure-noise_scale table tbody tr")
        assert page.locator("#figure-noise_scale thead th").first.inner_text() == "step"


def test_theme_is_chosen_and_kept(server: Server, desktop: BrowserContext) -> None:
    """The button goes from the system's theme to light to dark; the next page has it too."""
    with visit(desktop, server.url + "/") as visited:
        page = visited.page
        before = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        page.click("#theme")
        page.reload()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        page.evaluate("localStorage.clear()")


def test_comparing_more_than_five_is_told(server: Server, desktop: BrowserContext) -> None:
    """Five are drawn, the sixth is named as left out, and so is a run that there is not."""
    names = ["resnet50-8gpu", "gpt-124m.adamw", "unet-in-band", "bert-finetune", "digits", "waiting"]
    with visit(desktop, f"{server.url}/compare?run=" + "&run=".join(names)) as visited:
        wait_for_charts(visited.page)
        assert visited.page.locator("table.compare thead th").count() == 5
        assert "left out: waiting" in visited.page.inner_text("main")
        assert "not in one unit" in visited.page.inner_text("main")
    assert "no run named nobody" in server.get("/compare?run=nobody").text


def test_runs_are_picked_for_comparing(server: Server, desktop: BrowserContext) -> None:
    """Two ticks and a button lead to the comparison; no more than five can be ticked."""
    with visit(desktop, server.url + "/") as visited:
        page = visited.page
        boxes = page.locator("#rows input[type=checkbox]")
        for place in range(5):
            boxes.nth(place).check()
        assert boxes.nth(5).is_disabled()
        for place in range(2, 5):
            boxes.nth(place).uncheck()
        picked = [boxes.nth(place).input_value() for place in range(2)]
        page.click("#compare-button")
        page.wait_for_url("**/compare?**")
        wait_for_charts(page)
        assert page.locator("#compared [data-run]").count() == 2
        assert [one.get_attribute("data-run") for one in page.locator("#compared [data-run]").all()] == picked
