"""The server keeps to its OpenAPI document, whatever is asked of it: schemathesis over all of it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from noisescale_server.app import create_app
from noisescale_server.settings import Settings
from tests.server.conftest import migrate
from tests.server.reports import report, some_blocks
from tests.services import Server, running_postgres, running_server

ADMIN = {"Authorization": "Bearer admin-admin-admin-1234"}
KNOWN = "known"
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]
"""All but two, which the document cannot satisfy: rules over several fields are not in it, so some of
what it allows is refused; and numbers written as text and the like are taken where they are clear."""


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with an admin token and a run, on each database."""
    options: dict[str, Any] = {"admin_tokens": ADMIN["Authorization"].split()[1], "max_requests_per_s": 0}
    with contextlib.ExitStack() as stack:
        if request.param == "postgres":
            # Not the one of the other tests: a token that is made here would shut them out.
            options["database_url"] = stack.enter_context(running_postgres())
            migrate(options["database_url"])
        server = stack.enter_context(running_server(tmp_path_factory.mktemp("contract"), **options))
        assert server.post(f"/v1/runs/{KNOWN}/blocks", report(some_blocks(100)), **ADMIN).status == 200
        yield server


DOCUMENT = create_app(Settings(database_url="sqlite://")).openapi()


def test_the_server_has_this_document(guarded: Server) -> None:
    """What is checked below is what a running server says of itself."""
    assert guarded.get("/openapi.json").json() == DOCUMENT


@schemathesis.openapi.from_dict(DOCUMENT).parametrize()
@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_the_document_says(case: schemathesis.Case, guarded: Server) -> None:
    """No 5xx, and no status, media type, header or body that is not in the document."""
    case.call_and_validate(base_url=guarded.url, headers=ADMIN, checks=CHECKS)
