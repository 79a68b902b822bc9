"""A token of one team's runs: at no address does the server let the other team's be known."""

import re
from collections.abc import Iterator

import pytest
from fastapi.routing import APIRoute

from noisescale_server.app import create_app
from noisescale_server.routes import advice, docs, health, ingest, metrics, runs, tokens, web
from noisescale_server.settings import Settings
from tests.server.reports import report, some_blocks
from tests.services import Answer, Server, http, running_server

OURS, THEIRS, NOBODY = "vision-resnet", "speech-conformer", "speech-nobody"
GROUP = "their-secret-layer"
LABEL = "their-secret-label"
ADMIN, VISION = "admin-of-all-1234", "vision-only-1234"
ROUTERS = (advice, docs, health, ingest, metrics, runs, tokens, web)

VALUES = {"token_id": "0", "version": "x", "name": "base.css"}
QUERIES = {
    "/": ["", "?q=speech", "?q=conf", "?sort=run"],
    "/v1/runs": ["", "?name_contains=speech", "?limit=1000"],
    "/recommend": [f"?run={OURS}", f"?run={THEIRS}", "?run=speech-conforme"],
    "/compare": ["", f"?run={OURS}", f"?run={OURS}&run={THEIRS}"],
    "/plan": ["", f"?run={OURS}", f"?run={THEIRS}"],
    "/runs/{run}/multiples.json": ["?by=group", "?by=geometry"],
    "/runs/{run}/series.csv": ["", f"?group={GROUP}"],
    "/v1/runs/{run}/series": ["", f"?group={GROUP}"],
    "/sign-in": ["", f"?next=/runs/{OURS}"],
}


def requests() -> Iterator[tuple[str, str]]:
    """Method and address of everything there is, with our run's name and with theirs."""
    for module in ROUTERS:
        for route in module.router.routes:
            assert isinstance(route, APIRoute)
            for method in sorted(route.methods):
                for run in (OURS, THEIRS) if "{run}" in route.path else (OURS,):
                    path = route.path
                    for part, value in {"run": run, **VALUES}.items():
                        path = path.replace(f"{{{part}}}", value)
                    for query in QUERIES.get(route.path, [""]):
                        yield method, path + query


REQUESTS = list(requests())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two teams' runs and tokens."""
    settings = {"admin_tokens": ADMIN, "write_tokens": f"vision-*:{VISION}", "max_requests_per_s": 0}
    with running_server(tmp_path_factory.mktemp("shared"), **settings) as server:
        theirs = report(some_blocks(100), run={"labels": {"team": LABEL}})
        for block in theirs["blocks"]:
            block["sums"].append(block["sums"][0] | {"group": GROUP})
        for run, body in ((OURS, report(some_blocks(100))), (THEIRS, theirs)):
            assert server.post(f"/v1/runs/{run}/blocks", body, Authorization=f"Bearer {ADMIN}").status == 200
        made = server.post(
            "/v1/tokens", {"name": "of-speech", "prefix": "speech-"}, Authorization=f"Bearer {ADMIN}"
        )
        assert made.status == 201
        yield server


def asked(server: Server, method: str, path: str, token: str) -> Answer:
    """One request with a token; a POST sends a report."""
    headers = {"Authorization": f"Bearer {token}"}
    if method == "POST":
        return server.post(path, report(some_blocks(10)), **headers)
    return http(method, server.url + path, headers=headers)


def test_the_walk_is_over_all_there_is(shared: Server) -> None:
    """Every address of the OpenAPI document is walked, and nothing is served by another router."""
    walked = {(method, re.sub(r"\?.*", "", path)) for method, path in REQUESTS}
    for path, item in shared.get("/openapi.json").json()["paths"].items():
        for method in item:
            named = path.replace("{run}", OURS).replace("{token_id}", "0")
            assert (method.upper(), named) in walked
    application = create_app(Settings(database_url="sqlite://"))
    assert len(application.routes) == len(ROUTERS) + 1  # and the document itself


@pytest.mark.parametrize(("method", "path"), REQUESTS)
def test_no_answer_tells_of_the_other_teams_run(shared: Server, method: str, path: str) -> None:
    """Neither its name, groups, labels, nor tokens; its own name is as one that is not there."""
    answer = asked(shared, method, path, VISION)
    assert answer.status < 500
    for secret in {THEIRS, GROUP, LABEL, "of-speech"}:
        assert secret in path or secret not in answer.text
    nobody = asked(shared, method, path.replace(THEIRS, NOBODY), VISION)
    assert (nobody.status, nobody.text.replace(NOBODY, THEIRS)) == (answer.status, answer.text)


@pytest.mark.parametrize("path", ["/v1/runs", "/metrics", "/", "/plan", "/compare", f"/v1/runs/{THEIRS}"])
def test_what_is_looked_for_can_be_seen(shared: Server, path: str) -> None:
    """With a token of all runs the same answers do tell of it; else the walk would prove nothing."""
    assert THEIRS in asked(shared, "GET", path, ADMIN).text


def test_their_run_is_as_it_was(shared: Server) -> None:
    """Nothing that was sent in the walk reached it; the process's own metrics are for those who see all."""
    found = asked(shared, "GET", f"/v1/runs/{THEIRS}", ADMIN).json()
    assert (found["measured_steps"], found["info"]["labels"]) == (100, {"team": LABEL})
    assert asked(shared, "GET", "/metrics/process", VISION).status == 403
    assert asked(shared, "GET", "/metrics/process", ADMIN).status == 200


def test_an_admin_of_some_runs_makes_no_token_of_others(shared: Server) -> None:
    """Its tokens start where its own does, and it sees and revokes no others."""
    admin = f"Bearer {ADMIN}"
    ours = shared.post(
        "/v1/tokens", {"name": "boss", "scope": "admin", "prefix": "vision-"}, Authorization=admin
    ).json()
    boss = f"Bearer {ours['secret']}"
    for prefix in ("", "vision", "speech-"):
        refused = shared.post("/v1/tokens", {"name": "x", "prefix": prefix}, Authorization=boss)
        assert refused.status == 403
    made = shared.post("/v1/tokens", {"name": "x", "prefix": "vision-x-"}, Authorization=boss)
    assert made.status == 201
    listed = shared.get("/v1/tokens", Authorization=boss).json()["tokens"]
    assert {token["name"] for token in listed} == {"boss", "x"}
    theirs = next(
        t for t in shared.get("/v1/tokens", Authorization=admin).json()["tokens"] if t["name"] == "of-speech"
    )
    gone = http("DELETE", f"{shared.url}/v1/tokens/{theirs['id']}", headers={"Authorization": boss})
    assert gone.status == 404
    revoked = http("DELETE", f"{shared.url}/v1/tokens/{made.json()['id']}", headers={"Authorization": boss})
    assert (revoked.status, revoked.json()["active"]) == (200, False)
    assert shared.get("/v1/runs", Authorization=f"Bearer {made.json()['secret']}").status == 401
