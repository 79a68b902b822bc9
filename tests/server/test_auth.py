"""Tokens: scopes, prefixes, expiry, revocation, files, limits; over HTTP and by the command."""

import base64
import subprocess
from pathlib import Path

import pytest

from tests.server.reports import report, some_blocks
from tests.server.test_app import run_server_command
from tests.services import Server, running_server, wait_until

BODY = report(some_blocks(10))


def token_command(server: Server, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`noisescale-server token ...` on the server's database."""
    return run_server_command(
        "token", *arguments, NOISESCALE_DATABASE_URL=server.environment["NOISESCALE_DATABASE_URL"]
    )


def made(server: Server, *arguments: str) -> str:
    done = token_command(server, "create", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def bearer(token: str) -> str:
    return f"Bearer {token}"


def test_made_tokens_open_and_shut(tmp_path: Path) -> None:
    """A made token shuts the door for all others at once, works without a restart, and can be revoked."""
    with running_server(tmp_path) as server:
        assert server.post("/v1/runs/a/blocks", BODY).status == 200
        writer = made(server, "ci", "--scope", "write")
        assert writer.startswith("noisescale_")
        wait_until(lambda: server.post("/v1/runs/a/blocks", BODY).status == 401, what="the shut door")
        assert server.post("/v1/runs/a/blocks", BODY, Authorization=bearer(writer)).status == 200
        reader = made(server, "grafana", "--scope", "read")
        wait_until(
            lambda: server.get("/metrics", Authorization=bearer(reader)).status == 200, what="the new token"
        )
        assert server.post("/v1/runs/a/blocks", BODY, Authorization=bearer(reader)).status == 403
        listed = token_command(server, "list").stdout
        assert "grafana" in listed
        assert writer not in listed
        revoked = next(line.split()[0] for line in listed.splitlines() if line.endswith("ci"))
        assert token_command(server, "revoke", revoked).returncode == 0
        wait_until(
            lambda: server.get("/v1/runs", Authorization=bearer(writer)).status == 401, what="the revocation"
        )
        assert writer not in server.log.read_text()
        database = (tmp_path / "noisescale.db").read_bytes()
        assert writer.encode() not in database


def test_a_prefix_limits_what_is_seen_and_written(tmp_path: Path) -> None:
    """A token for vision-* sees and writes those runs alone, in lists, runs, advice and /metrics."""
    with running_server(tmp_path, write_tokens="all-of-them-1234,vision-*:only-vision-1234") as server:
        everyone, vision = bearer("all-of-them-1234"), bearer("only-vision-1234")
        for name in ("vision-a", "speech-a"):
            assert server.post(f"/v1/runs/{name}/blocks", BODY, Authorization=everyone).status == 200
        assert server.post("/v1/runs/vision-b/blocks", BODY, Authorization=vision).status == 200
        refused = server.post("/v1/runs/speech-a/blocks", BODY, Authorization=vision)
        assert refused.status == 403
        assert "vision-" in refused.json()["error"]["message"]
        seen = {run["run"] for run in server.get("/v1/runs", Authorization=vision).json()["runs"]}
        assert seen == {"vision-a", "vision-b"}
        unknown = server.get("/recommend?run=speech-a", Authorization=vision)
        assert unknown.status == 404
        assert "speech-a" not in unknown.json()["error"]["nearest"]
        for path in ("/v1/runs/speech-a", "/v1/runs/speech-a/series", "/runs/speech-a"):
            assert server.get(path, Authorization=vision).status == 404, path
        metrics = server.get("/metrics", Authorization=vision).text
        assert 'run_id="vision-a"' in metrics
        assert "speech" not in metrics
        assert 'run_id="speech-a"' in server.get("/metrics", Authorization=everyone).text


def test_browsers_and_open_reading(tmp_path: Path) -> None:
    """A token as the password of basic authentication reads and never writes; open_reading lets all read."""
    basic = "Basic " + base64.b64encode(b"anybody:secret-secret-1234").decode()
    with running_server(tmp_path / "a", write_tokens="secret-secret-1234") as server:
        assert server.get("/v1/runs").status == 401
        assert server.get("/v1/runs", Authorization=basic).status == 200
        assert server.post("/v1/runs/a/blocks", BODY, Authorization=basic).status == 403
    with running_server(tmp_path / "b", write_tokens="secret-secret-1234", open_reading="true") as server:
        assert server.get("/v1/runs").status == 200
        assert server.post("/v1/runs/a/blocks", BODY).status == 401


def test_signing_in_at_the_page(tmp_path: Path) -> None:
    """The page asks for a token, keeps it in a cookie that opens GETs alone, and refuses a wrong one."""
    with running_server(tmp_path, read_tokens="look-look-look-1234", write_tokens="w" * 20) as server:
        asked = server.get("/runs/a")
        assert b"token" in asked.body  # redirected to the form
        form = {"Content_Type": "application/x-www-form-urlencoded"}
        wrong = server.post("/sign-in", b"token=wrong&next=/", **form)
        assert wrong.status == 401
        cookie = "noisescale_token=look-look-look-1234"
        assert server.get("/v1/runs", Cookie=cookie).status == 200
        assert server.post("/v1/runs/a/blocks", BODY, Cookie=cookie).status == 401
        assert server.get("/v1/runs", Cookie="noisescale_token=wrong").status == 401


def test_secrets_from_files(tmp_path: Path) -> None:
    """NOISESCALE_WRITE_TOKENS_FILE; several lines are several tokens."""
    secret = tmp_path / "tokens"
    secret.write_text("first-first-1234\nsecond-second-1234\n")
    with running_server(tmp_path / "server", write_tokens_file=secret) as server:
        for token in ("first-first-1234", "second-second-1234"):
            assert server.post("/v1/runs/a/blocks", BODY, Authorization=bearer(token)).status == 200
        assert server.post("/v1/runs/a/blocks", BODY).status == 401


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"NOISESCALE_WRITE_TOKENS_FILE": "/nowhere"}, "cannot be read"),
        ({"NOISESCALE_WRITE_TOKENS_FILE": "/dev/null"}, "is empty"),
        ({"NOISESCALE_WRITE_TOKENS_FILE": "/dev/null", "NOISESCALE_WRITE_TOKENS": "abc"}, "both set"),
    ],
)
def test_wrong_secret_files(settings: dict[str, str], words: str) -> None:
    """A file that is not there or empty would leave the door open: the server does not start."""
    done = run_server_command("serve", "--port", "0", **settings)
    assert done.returncode == 1
    assert words in done.stderr
    assert "abc" not in done.stderr


def test_limits_of_one_token_and_run(tmp_path: Path) -> None:
    """Runs per token and layer groups per run are bounded, with clear answers and nothing stored."""
    settings = {
        "write_tokens": "a*:token-of-a-1234,b*:token-of-b-1234",
        "max_runs_per_token": 2,
        "max_groups": 3,
    }
    with running_server(tmp_path, **settings) as server:
        a, b = bearer("token-of-a-1234"), bearer("token-of-b-1234")
        for name in ("a1", "a2"):
            assert server.post(f"/v1/runs/{name}/blocks", BODY, Authorization=a).status == 200
        refused = server.post("/v1/runs/a3/blocks", BODY, Authorization=a)
        assert refused.status == 429
        assert "NOISESCALE_MAX_RUNS_PER_TOKEN" in refused.json()["error"]["message"]
        assert server.post("/v1/runs/b1/blocks", BODY, Authorization=b).status == 200
        many = report(some_blocks(20, seed=1)[1:])
        sums = many["blocks"][0]["sums"][0]
        many["blocks"][0]["sums"] = [sums | {"group": f"layer-{index}"} for index in range(4)]
        refused = server.post("/v1/runs/a1/blocks", many, Authorization=a)
        assert refused.status == 422
        assert "layer groups" in refused.json()["error"]["message"]
        assert server.get("/v1/runs/a1", Authorization=a).json()["measured_steps"] == 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "x", "--scope", "king"), "read, write, admin"),
        (("create", "x", "--prefix", "a b"), "--prefix"),
        (("create", "x", "--days", "0"), "--days"),
        (("create", ""), "name"),
        (("revoke", "nothing"), "token list"),
    ],
)
def test_wrong_token_commands(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """Each is one line that says what to write."""
    done = run_server_command("token", *arguments, NOISESCALE_DATABASE_URL=f"sqlite:///{tmp_path}/x.db")
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
