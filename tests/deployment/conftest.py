"""One stack for all tests of this folder that look at it: one run changes its batch and rate."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.deployment.stack import Job, running_stack
from tests.services import Prometheus, Server, wait_until


@dataclass
class Stack:
    """What runs, since when its data is complete, and for how long it was collected."""

    server: Server
    prometheus: Prometheus


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two live runs, scraped before and after a change of batch and learning rate."""
    with running_stack(tmp_path_factory.mktemp("stack")) as (server, prometheus):
        digits, words = Job(server, "digits"), Job(server, "words", batch=512.0)
        digits.train(600)
        words.train(400)

        def seen(promql: str) -> None:
            wait_until(lambda: prometheus.query(promql), what=f"an answer to {promql}")

        seen('noisescale_recommendation{run_id="digits", action="raise"} == 1')
        # Annotations look back by an interval, so there has to be something to look back at.
        seen('noisescale_global_batch_size{run_id="digits"} offset 4s')
        digits.batch, digits.rate = 128.0, 0.2
        digits.train(100)
        seen('noisescale_recommendation{run_id="digits", action="raise"} == 0')
        digits.train(500, skip=True)
        seen('noisescale_steps_total{run_id="digits"} == 1200')
        seen('noisescale:skipped_steps:ratio_rate15m{run_id="digits"} > 0')
        yield Stack(server, prometheus)
