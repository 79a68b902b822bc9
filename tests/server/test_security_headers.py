"""What every answer tells browsers, and how the sign-in's cookie is kept."""

import http.client
from collections.abc import Iterator

import pytest

from tests.server.reports import report, some_blocks
from tests.services import Answer, Server, running_server
from tests.services import http as request

ALWAYS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
READER = "look-look-look-1234"
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def headers_of(answer: Answer) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items()}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/docs", 200),
        ("GET", "/openapi.json", 200),
        ("GET", "/v1/runs", 200),
        ("GET", "/metrics", 200),
        ("GET", "/healthz", 200),
        ("GET", "/nothing", 404),
        ("GET", "/runs/nothing", 404),
        ("DELETE", "/v1/runs", 405),
        ("GET", "/v1/runs?limit=0", 422),
        ("POST", "/v1/runs/a/blocks", 400),
        ("BREW", "/", 400),
    ],
)
def test_every_answer_has_them(sqlite_server: Server, method: str, path: str, status: int) -> None:
    """Pages, numbers, errors, and what is not even HTTP."""
    answer = request(method, sqlite_server.url + path)
    assert answer.status == status
    found = headers_of(answer)
    assert {name: found.get(name) for name in ALWAYS} == ALWAYS
    assert "frame-ancestors 'none'" in found["content-security-policy"]
    assert "script-src 'unsafe" not in found["content-security-policy"]
    assert "camera=()" in found["permissions-policy"]
    assert "strict-transport-security" not in found


def test_numbers_are_kept_by_no_cache(sqlite_server: Server, run: str) -> None:
    """What is behind a token is no-store, or asked again by the one browser that has it."""
    sqlite_server.post(f"/v1/runs/{run}/blocks", report(some_blocks(10)))
    for path in (
        "/v1/runs",
        f"/v1/runs/{run}",
        f"/runs/{run}/charts.json",
        f"/runs/{run}/series.csv",
        "/metrics",
    ):
        assert headers_of(sqlite_server.get(path))["cache-control"] == "no-store", path
    assert headers_of(sqlite_server.get(f"/runs/{run}"))["cache-control"] == "no-cache, private"


def test_tls_is_asked_for_again_where_there_is_tls(sqlite_server: Server) -> None:
    """A proxy on this machine that ends TLS is believed."""
    found = headers_of(sqlite_server.get("/v1/runs", X_Forwarded_Proto="https"))
    assert found["strict-transport-security"] == "max-age=31536000"


@pytest.mark.parametrize(
    "path", ["/", "/v1/runs", "/recommend", "/metrics", "/v1/runs/a/blocks", "/openapi.json"]
)
@pytest.mark.parametrize("method", ["OPTIONS", "GET", "POST"])
def test_no_other_site_may_read(sqlite_server: Server, method: str, path: str) -> None:
    """No answer, to a preflight neither, has a header that lets another origin's script in."""
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    answer = request(method, sqlite_server.url + path, headers=asked)
    assert not [name for name in headers_of(answer) if name.startswith("access-control-")]
    if method == "OPTIONS":
        assert answer.status == 405


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a read token."""
    with running_server(tmp_path_factory.mktemp("guarded"), read_tokens=READER) as server:
        yield server


def sent(server: Server, path: str, body: str = "", **headers: str) -> tuple[int, str, str]:
    """POST a form as a browser does, without following: status, cookie that is set, where it leads."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", path, body, FORM | named)
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers["set-cookie"] or "", answer.headers["location"] or ""
    finally:
        connection.close()


def test_the_cookie_is_for_this_site_and_no_script(guarded: Server) -> None:
    """HttpOnly, SameSite=Strict, and Secure where the request came by TLS; signing out takes it away."""
    status, cookie, place = sent(guarded, "/sign-in", f"token={READER}&next=/runs/a")
    assert (status, place) == (303, "/runs/a")
    assert cookie.startswith(f"noisescale_token={READER};")
    parts = {part.strip().lower() for part in cookie.split(";")}
    assert {"httponly", "samesite=strict", "path=/"} <= parts
    assert "secure" not in parts
    _, cookie, _ = sent(guarded, "/sign-in", f"token={READER}", X_Forwarded_Proto="https")
    assert "secure" in {part.strip().lower() for part in cookie.split(";")}
    status, cookie, place = sent(guarded, "/sign-out")
    assert (status, place) == (303, "/sign-in")
    assert cookie.startswith('noisescale_token=""')
    assert "Max-Age=0" in cookie


@pytest.mark.parametrize("wanted", ["https://evil.example/", "//evil.example/", "/\\evil.example", "x", ""])
def test_signing_in_leads_nowhere_else(guarded: Server, wanted: str) -> None:
    """The form cannot be made to send people to another site."""
    assert sent(guarded, "/sign-in", f"token={READER}&next={wanted}")[::2] == (303, "/")


@pytest.mark.parametrize("path", ["/sign-in", "/sign-out"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 303),
        ({}, 303),
    ],
)
def test_other_sites_cannot_sign_anybody_in_or_out(
    guarded: Server, path: str, headers: dict[str, str], status: int
) -> None:
    """A form that another site's page sends is refused, and sets no cookie."""
    found, cookie, _ = sent(guarded, path, f"token={READER}", **headers)
    assert found == status
    assert bool(cookie) == (status == 303)


def test_a_browsers_own_form_passes_without_tls(guarded: Server) -> None:
    """By plain HTTP a browser sends no Sec-Fetch-Site; then its Origin is this host."""
    own = f"http://127.0.0.1:{guarded.port}"
    assert sent(guarded, "/sign-in", f"token={READER}", Origin=own)[0] == 303
