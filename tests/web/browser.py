"""Debian's Chromium, and everything that a page complains of in it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Request, sync_playwright

from tests.services import required_tool, wait_until

DESKTOP = (1280, 900)
PHONE = (390, 844)
DRAWING = ("/runs/", "/compare?", "/plan")
"""Pages with charts start like this."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Headless, and closed at the end."""
    program = required_tool("chromium")
    with sync_playwright() as playwright:
        # --no-sandbox: CI runs as root, where Chromium's own sandbox refuses to.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def device(browser: Browser, *, phone: bool = False, dark: bool = False) -> Iterator[BrowserContext]:
    """A browser's window on a desk or a phone, with cookies and a cache of its own."""
    width, height = PHONE if phone else DESKTOP
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if dark else "light",
        device_scale_factor=2 if phone else 1,
        is_mobile=phone,
        has_touch=phone,
        accept_downloads=True,
    )
    context.set_default_timeout(30_000)
    yield context
    context.close()


@dataclass
class Visit:
    """One open page.

    Attributes:
        complaints: Console errors and warnings, thrown errors, what did not load, and requests to
            anywhere but the server.
    """

    page: Page
    complaints: list[str] = field(default_factory=list)


@contextlib.contextmanager
def visit(context: BrowserContext, url: str) -> Iterator[Visit]:
    """Open a page, and close it at the end."""
    page = context.new_page()
    visited = Visit(page)
    origin = "/".join(url.split("/")[:3])

    def asked(request: Request) -> None:
        if not request.url.startswith((origin, "data:", "blob:")):
            visited.complaints.append(f"asked elsewhere: {request.url}")

    page.on(
        "console",
        lambda said: visited.complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: visited.complaints.append(f"thrown: {error}"))
    page.on("requestfailed", lambda request: visited.complaints.append(f"not loaded: {request.url}"))
    page.on("request", asked)
    page.goto(url)
    yield visited
    page.close()


def wait_for_charts(page: Page) -> None:
    """Until the page has drawn its charts."""
    page.wait_for_selector("body[data-drawn]")


def until(page: Page, expression: str) -> None:
    """Wait for JavaScript to be true.

    Not wait_for_function, which the pages' policy against eval forbids.
    """
    wait_until(lambda: page.evaluate(expression), timeout_s=30, what=expression)


def serious_violations(page: Page) -> list[str]:
    """What axe-core finds that is serious or critical: the rule, and where it was broken."""
    return [
        f"{found['id']}: {[node['target'] for node in found['nodes']][:3]}"
        for found in Axe().run(page).response["violations"]
        if found["impact"] in ("serious", "critical")
    ]
