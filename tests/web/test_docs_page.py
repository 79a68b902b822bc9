"""`/docs` in a real Chromium: drawn and tried out, with nothing asked of any other machine."""

import pytest
from playwright.sync_api import BrowserContext

from tests.services import Server
from tests.web.browser import visit


@pytest.mark.parametrize("window", ["desktop", "phone"])
def test_the_api_can_be_read_and_tried(server: Server, window: str, request: pytest.FixtureRequest) -> None:
    """Every endpoint is there, one can be called from the page, and the page's policy holds."""
    context: BrowserContext = request.getfixturevalue(window)
    with visit(context, server.url + "/docs") as visited:
        page = visited.page
        page.wait_for_selector(".swagger-ui .opblock")
        endpoints = sum(len(item) for item in server.get("/openapi.json").json()["paths"].values())
        assert page.locator(".opblock").count() == endpoints
        page.click("#operations-health-get_health_healthz_get .opblock-summary-control")
        page.click("text=Try it out")
        page.click("button.execute")
        page.wait_for_selector(".live-responses-table >> text=ok")
        assert visited.complaints == []
    policy = {name.lower(): value for name, value in server.get("/docs").headers.items()}
    assert "unsafe" not in policy["content-security-policy"]


def test_the_pages_that_load_from_elsewhere_are_gone(server: Server) -> None:
    """FastAPI's own are at neither address."""
    assert server.get("/redoc").status == 404
    assert b"cdn" not in server.get("/docs").body
