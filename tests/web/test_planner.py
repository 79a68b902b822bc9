"""The planner's arithmetic is POST /recommend's, and its state is in the address."""

from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page

from tests.services import Server
from tests.web.browser import until, visit

PLANS: list[tuple[str, dict[str, str]]] = [
    ("/plan?run=resnet50-8gpu", {"target_dp_world_size": "32"}),
    ("/plan?run=resnet50-8gpu", {"target_micro_batch_size": "16", "target_accumulation_steps": "2"}),
    ("/plan?run=resnet50-8gpu", {"optimizer": "adam", "target_dp_world_size": "64"}),
    ("/plan?run=resnet50-8gpu", {"target_dp_world_size": "4", "max_micro_batch_size": "32"}),
    ("/plan?run=vit-small.too-big", {"target_dp_world_size": "4"}),
    ("/plan", {"target_dp_world_size": "16", "learning_rate": "0.25", "noise_scale_lower": "900"}),
]  # fmt: skip


def shown(page: Page) -> dict[str, float | None]:
    """The plan's figures, in full."""
    names = {"batch": "global_batch_size", "rate": "learning_rate", "warmup": "ramp_steps"}
    names |= {"steps": "steps_multiplier", "examples": "examples_multiplier"}
    values = {key: page.locator(f"#plan-{name}").get_attribute("data-value") for name, key in names.items()}
    return {key: float(value) if value else None for key, value in values.items()}


def rates(page: Page) -> dict[str, float]:
    """The table of rules."""
    return {
        str(row.get_attribute("data-rule")): float(
            row.locator("[data-value]").get_attribute("data-value") or 0
        )
        for row in page.locator("#answer [data-rule]").all()
    }


def question(server: Server, path: str, typed: dict[str, str]) -> dict[str, Any]:
    """What is typed, as a person would ask it over HTTP, with the run's own numbers from the API."""
    numbers = {name: value if name == "optimizer" else float(value) for name, value in typed.items()}
    if "run=" in path:
        name = path.partition("run=")[2]
        advice = server.get(f"/recommend?run={name}").json()
        reported = server.get(f"/v1/runs/{name}").json()["info"]
        asked: dict[str, Any] = {
            "noise_scale": advice["noise_scale"],
            "measured_steps": advice["measured_steps"],
            "global_batch_size": advice["global_batch_size_now"],
            "learning_rate": advice["learning_rate_now"],
            "optimizer": reported["optimizer"],
            "momentum": reported["momentum"],
            "max_micro_batch_size": reported["max_micro_batch_size"],
        }
        layout = [advice["facts"][f] for f in ("dp_world_size", "micro_batch_size", "accumulation_steps")]
    else:
        asked = {
            "noise_scale": {"value": 2000, "lower": 1600, "upper": 2500},
            "measured_steps": 1000,
            "global_batch_size": 256,
            "learning_rate": 0.1,
            "optimizer": "sgd",
        }
        layout = [8, 32, 1]
    given = dict(zip(("dp_world_size", "micro_batch_size", "accumulation_steps"), layout, strict=True))
    ranks, micro, accumulation = (numbers.get(f"target_{name}", value) for name, value in given.items())
    for name in ("optimizer", "learning_rate", "max_micro_batch_size"):
        asked[name] = numbers.get(name, asked.get(name))
    if "noise_scale_lower" in numbers:
        asked["noise_scale"]["lower"] = numbers["noise_scale_lower"]
    target = {"target_dp_world_size": int(ranks), "target_global_batch_size": ranks * micro * accumulation}
    return asked | given | target


@pytest.mark.parametrize(("path", "typed"), PLANS)
def test_planner_equals_post_recommend(
    server: Server, desktop: BrowserContext, path: str, typed: dict[str, str]
) -> None:
    """What the page shows while somebody types is, to the last digit, what POST /recommend answers."""
    plan = server.post("/recommend", question(server, path, typed)).json()["plan"]
    with visit(desktop, server.url + path) as visited:
        page = visited.page
        for name, value in typed.items():
            if name == "optimizer":
                page.select_option(f"select[name={name}]", value)
            else:
                page.fill(f"input[name={name}]", value)
        for name, value in typed.items():
            until(page, f"document.body.dataset.worked.includes('{name}={value}')")
        wanted = {key: plan[key] for key in ("global_batch_size", "ramp_steps", "steps_multiplier")}
        wanted |= {key: plan[key] for key in ("learning_rate", "examples_multiplier")}
        assert shown(page) == pytest.approx(wanted, rel=1e-12)
        assert rates(page) == pytest.approx(plan["rules"], rel=1e-12)
        body = page.locator("#body").text_content() or ""
        assert server.post("/recommend", body.encode()).json()["plan"] == plan
        assert visited.complaints == []


def test_address_carries_the_plan(server: Server, desktop: BrowserContext) -> None:
    """Opened again, or sent to somebody, it shows the same plan."""
    with visit(desktop, server.url + "/plan?run=resnet50-8gpu") as visited:
        page = visited.page
        page.fill("input[name=target_dp_world_size]", "24")
        page.select_option("select[name=optimizer]", "adamw")
        until(page, "document.body.dataset.worked.includes('optimizer=adamw')")
        planned = shown(page), rates(page)
        address = page.url
    with visit(desktop, address) as visited:
        assert visited.page.input_value("input[name=target_dp_world_size]") == "24"
        assert visited.page.input_value("select[name=optimizer]") == "adamw"
        assert (shown(visited.page), rates(visited.page)) == planned


def test_advice_is_a_preset(server: Server, desktop: BrowserContext) -> None:
    """One press plans what is advised: the same batch, and the same learning rate."""
    advice = server.get("/recommend?run=resnet50-8gpu").json()
    with visit(desktop, server.url + "/plan?run=resnet50-8gpu") as visited:
        page = visited.page
        page.click("text=The advice")
        until(
            page, f"document.getElementById('plan-batch')?.dataset.value === '{advice['global_batch_size']}'"
        )
        assert shown(page)["learning_rate"] == pytest.approx(advice["learning_rate"], rel=1e-12)
        assert page.locator(".chip[aria-pressed=true]").inner_text() == "The advice"


def test_steps_still_to_do_are_converted(server: Server, desktop: BrowserContext) -> None:
    """10,000 steps at the batch of now become as many as the plan's multiplier says."""
    with visit(desktop, server.url + "/plan?run=resnet50-8gpu&target_dp_world_size=16") as visited:
        page = visited.page
        page.fill("input[name=remaining_steps]", "10000")
        until(page, "document.body.dataset.worked.includes('remaining_steps=10000')")
        multiplier = shown(page)["steps_multiplier"]
        assert multiplier is not None
        told = page.locator("#plan-steps + small").inner_text()
        assert float(told.split()[0].replace(",", "")) == pytest.approx(10_000 * multiplier, rel=1e-3)


def test_what_cannot_be_is_said_at_its_field(server: Server, desktop: BrowserContext) -> None:
    """A number that is none is marked, and correcting it brings the answer back."""
    with visit(desktop, server.url + "/plan?run=resnet50-8gpu") as visited:
        page = visited.page
        page.fill("input[name=target_dp_world_size]", "0")
        page.wait_for_selector("input[name=target_dp_world_size][aria-invalid=true]")
        assert "greater than or equal to 1" in page.inner_text("#error-target_dp_world_size")
        page.fill("input[name=target_dp_world_size]", "16")
        page.wait_for_selector("#plan-batch")
        assert page.locator("[aria-invalid=true]").count() == 0


def test_memory_limit_warns(server: Server) -> None:
    """A micro-batch beyond the limit is planned all the same, with a warning."""
    query = "run=resnet50-8gpu&target_micro_batch_size=512&max_micro_batch_size=128"
    assert "does not fit: the memory limit is 128" in server.get(f"/plan?{query}").text
