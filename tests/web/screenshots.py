"""Photographs the pages in Chromium.

    python -m tests.web.screenshots             # docs/images/page-*.png, of real jobs: four minutes
    python -m tests.web.screenshots --look DIR  # every page, on a desk and a phone, light and dark

The pictures in the documentation are of scikit-learn's digits, trained on two ranks with several batches, and
taken while the last of those jobs has not ended. `--look` shows runs of every kind, made from noise, so
that a person who changes the pages sees quickly what became of them.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, Page

from tests.services import Server, running_server, wait_until
from tests.web.browser import chromium, device, visit, wait_for_charts
from tests.web.seeded import seed_all

IMAGES = Path(__file__).parents[2] / "docs" / "images"

JOBS: dict[str, tuple[int, int]] = {
    "digits-batch-1024": (512, 400),
    "digits-batch-192": (96, 1200),
    "digits-batch-8": (4, 120),
    "digits-batch-64": (32, 1600),
}
"""Each job's batch per rank, and its steps."""

SHOWN_JOB, SHOWN_BATCH, SHOWN_STEPS = "digits-batch-16", 8, 3000
"""The job that is photographed in the middle of its training."""

LOOKED_AT = {
    "runs": "/",
    "none-found": "/?q=no-such-run",
    "run": "/runs/resnet50-8gpu",
    "run-adam": "/runs/gpt-124m.adamw",
    "run-uncertain": "/runs/bert-finetune",
    "run-waiting": "/runs/waiting",
    "compare": "/compare?run=resnet50-8gpu&run=unet-in-band&run=vit-small.too-big",
    "plan": "/plan?run=resnet50-8gpu&target_dp_world_size=32",
    "plan-by-hand": "/plan",
    "sign-in": "/sign-in",
    "unknown": "/runs/resnet",
}


def train(server: Server, run: str, *, local_batch_size: int, steps: int) -> "subprocess.Popen[bytes]":
    """Start the digits job on two ranks."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "noisescale.hooks.digits", "--report-to", server.url, "--run-name", run),
        *("--local-batch-size", str(local_batch_size), "--steps", str(steps)),
    ]
    return subprocess.Popen(command, stdout=sys.stderr, env=os.environ | {"OMP_NUM_THREADS": "1"})


def photograph_real_jobs(folder: Path) -> None:
    """The list of runs and one run's page, for the documentation."""
    with tempfile.TemporaryDirectory() as data, running_server(Path(data)) as server:
        for run, (local_batch_size, steps) in JOBS.items():
            status = train(server, run, local_batch_size=local_batch_size, steps=steps).wait()
            if status != 0:
                raise SystemExit(f"the job {run} ended with status {status}")
        job = train(server, SHOWN_JOB, local_batch_size=SHOWN_BATCH, steps=10 * SHOWN_STEPS)
        try:
            wait_until(lambda: _steps(server, SHOWN_JOB) >= SHOWN_STEPS, timeout_s=300, what="the job")
            with chromium() as browser:
                for rank in _children(job.pid):
                    os.kill(rank, signal.SIGSTOP)  # so that all numbers on a picture are of one moment
                _photograph(browser, f"{server.url}/", folder / "page-runs.png", height=640)
                page = f"{server.url}/runs/{SHOWN_JOB}"
                _photograph(browser, page, folder / "page-run.png", height=1120, draws=True)
        finally:
            for pid in (job.pid, *_children(job.pid)):
                os.kill(pid, signal.SIGKILL)
            job.wait()


def _children(pid: int) -> list[int]:
    """The ranks of a torchrun, each of which is in a session of its own."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def photograph_everything(folder: Path) -> None:
    """Every page in four ways; complaints of the browser are printed."""
    with (
        tempfile.TemporaryDirectory() as data,
        running_server(Path(data)) as server,
        chromium() as browser,
    ):
        seed_all(server)
        for phone, dark in itertools.product((False, True), repeat=2):
            with device(browser, phone=phone, dark=dark) as context:
                for name, path in LOOKED_AT.items():
                    kind = f"{'phone' if phone else 'desk'}-{'dark' if dark else 'light'}"
                    with visit(context, server.url + path) as visited:
                        _settle(visited.page, draws=path.startswith(("/runs/", "/compare?")))
                        visited.page.screenshot(path=folder / f"{name}-{kind}.png", full_page=True)
                        for complaint in visited.complaints:
                            sys.stdout.write(f"{name}, {kind}: {complaint}\n")


def _photograph(browser: Browser, url: str, file: Path, *, height: int, draws: bool = False) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": height}, device_scale_factor=1.5)
    with visit(context, url) as visited:
        _settle(visited.page, draws=draws)
        visited.page.screenshot(path=file)
    context.close()


def _settle(page: Page, *, draws: bool) -> None:
    """Until all is drawn: the small charts too, which wait until they are scrolled to."""
    if draws and page.locator(".plot").count():
        wait_for_charts(page)
        for box in page.locator("[data-multiples]:has(.multiples)").all():
            box.scroll_into_view_if_needed()
            box.locator(".main-svg").first.wait_for()
        page.evaluate("scrollTo(0, 0)")
    page.wait_for_load_state("networkidle")


def _steps(server: Server, run: str) -> int:
    answer = server.get(f"/v1/runs/{run}")
    return int(answer.json()["steps"]) if answer.status == 200 else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--look", type=Path, metavar="DIR", help="photograph every page into this folder")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder (default: docs/images)")
    options = parser.parse_args(arguments)
    folder = options.look or options.output
    folder.mkdir(parents=True, exist_ok=True)
    if options.look:
        photograph_everything(folder)
    else:
        photograph_real_jobs(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
