"""One server for all tests of this folder: seeded runs, and one of a real 2-rank job."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext

from tests.services import Server, running_server
from tests.web.browser import chromium, device
from tests.web.seeded import seed_all

REAL_STEPS = 300


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs of every kind; "digits" is scikit-learn's digits, trained on 2 gloo ranks just now."""
    # The runs report once, and are to be live until the last test, on a slow machine too.
    with running_server(tmp_path_factory.mktemp("web"), grace_s=3600) as running:
        seed_all(running)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *("-m", "noisescale.hooks.digits", "--steps", str(REAL_STEPS)),
            *("--report-to", running.url, "--run-name", "digits"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium."""
    with chromium() as running:
        yield running


@pytest.fixture(scope="session")
def desktop(browser: Browser) -> Iterator[BrowserContext]:
    """A light desktop window, whose cache the tests share as a person's pages do."""
    with device(browser) as context:
        yield context


@pytest.fixture(scope="session")
def phone(browser: Browser) -> Iterator[BrowserContext]:
    """A dark phone."""
    with device(browser, phone=True, dark=True) as context:
        yield context
