"""What the files under docker/ say, held against the server and each other. `test_lint.py` checks more."""

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from noisescale_server.settings import Settings
from tests.deployment.build_image import base_image
from tests.deployment.conftest import Stack
from tests.deployment.stack import DOCKER, READ_TOKEN, WRITE_TOKEN

ROOT = DOCKER.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
TEXTS = {
    path: path.read_text()
    for path in DOCKER.rglob("*")
    if path.is_file() and path.suffix not in (".json", ".pyc") and "secrets" not in path.parts
}
# Of the example job, not of the server.
TRAINING = {"NOISESCALE_REPORT_TO", "NOISESCALE_RUN", "NOISESCALE_TOKEN_FILE"}


def test_only_settings_that_exist_are_set() -> None:
    """Every NOISESCALE_ variable in a file is a setting of the server, or of the example job."""
    known = {f"NOISESCALE_{name.upper()}" for name in Settings.model_fields} | TRAINING
    known |= {f"{name}_FILE" for name in known}
    for path, text in TEXTS.items():
        named = set(re.findall(r"\bNOISESCALE_[A-Z][A-Z_]*[A-Z]\b", text))
        assert named <= known, f"{path.relative_to(ROOT)} sets what there is not: {named - known}"


def test_secrets_can_be_read_from_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A setting named with _FILE is read from that file, as compose.yaml and the unit do with secrets."""
    for setting, text in (
        ("WRITE_TOKENS", "a,b\n"),
        ("READ_TOKENS", "c"),
        ("DATABASE_URL", "sqlite:///x.db"),
    ):
        (tmp_path / setting).write_text(text)
        monkeypatch.setenv(f"NOISESCALE_{setting}_FILE", str(tmp_path / setting))
    settings = Settings()
    assert [token.get_secret_value() for token in settings.write_tokens] == ["a", "b"]
    assert [token.get_secret_value() for token in settings.read_tokens] == ["c"]
    assert settings.database_url == "sqlite+aiosqlite:///x.db"


def test_ports_are_published_on_loopback_only() -> None:
    """Nothing in the compose file listens beyond this machine."""
    for name, service in COMPOSE["services"].items():
        for port in service.get("ports", []):
            assert str(port).startswith("127.0.0.1:"), (name, port)


def test_images_are_pinned() -> None:
    """Every image has a tag with a full version; ours has the project's."""
    for name, service in COMPOSE["services"].items():
        tag = service["image"].rpartition(":")[2]
        assert re.match(r"v?\d+\.\d+", tag), (name, service["image"])
        if "noisescale" in service["image"]:
            assert tag == VERSION
    assert re.search(r":\d+\.\d+\.\d+-slim-", base_image())
    assert base_image() in (DOCKER / "train.Dockerfile").read_text()


def test_the_chart_has_the_projects_version() -> None:
    """The chart's appVersion, which is the image's default tag, is the version of the project."""
    chart = yaml.safe_load((DOCKER / "helm" / "noisescale" / "Chart.yaml").read_text())
    assert chart["appVersion"] == VERSION
    assert f"noisescale-train:{VERSION}" in (DOCKER / "examples" / "kubernetes-job.yaml").read_text()


def test_secrets_come_from_files() -> None:
    """No password or token is written into the compose file: each is a file that make-secrets.sh makes."""
    for name, service in COMPOSE["services"].items():
        for variable, value in service.get("environment", {}).items():
            if re.search("TOKEN|PASSWORD|DATABASE_URL", variable):
                assert variable.endswith("_FILE"), (name, variable)
                assert value.removeprefix("/run/secrets/") in service["secrets"], (name, variable)
    assert set(COMPOSE["secrets"]) == {
        secret for service in COMPOSE["services"].values() for secret in service.get("secrets", [])
    }


def test_make_secrets_makes_each_once(tmp_path: Path) -> None:
    """The script makes every secret that the compose file mounts, random, and never replaces one."""
    (tmp_path / "secrets").mkdir()
    script = shutil.copy(DOCKER / "make-secrets.sh", tmp_path)
    made = []
    for _ in range(2):
        subprocess.run(["sh", str(script)], check=True)
        made.append({path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()})
    assert made[0] == made[1]
    assert set(made[0]) == set(COMPOSE["secrets"])
    assert len({made[0][name] for name in made[0]}) == len(made[0])
    assert made[0]["postgres_password"] in made[0]["database_url"]
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    url = Settings(database_url=made[0]["database_url"]).database_url
    assert url.startswith("postgresql+asyncpg://noisescale:")


def test_the_servers_containers_are_locked_down() -> None:
    """Our containers have a read-only root, no capabilities, and no way to get any."""
    ours = {name: s for name, s in COMPOSE["services"].items() if "noisescale" in s["image"]}
    assert set(ours) == {"server", "replica", "migrate"}
    for service in ours.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]


def test_one_profile_starts_one_kind_of_server() -> None:
    """Each of ours belongs to one profile, and the default profile is the one with SQLite."""
    profiles = {name: s["profiles"] for name, s in COMPOSE["services"].items() if "profiles" in s}
    assert profiles == {
        "server": ["single"],
        "replica": ["replicated"],
        "migrate": ["replicated"],
        "postgres": ["replicated"],
    }
    assert "COMPOSE_PROFILES=single\n" in (DOCKER / ".env").read_text()
    assert COMPOSE["services"]["replica"]["deploy"]["replicas"] == 2


@pytest.mark.parametrize("name", ["Dockerfile", "train.Dockerfile"])
def test_what_is_copied_is_let_in(name: str) -> None:
    """Every path that a Dockerfile copies is in its .dockerignore's exceptions, and nothing else is."""
    text = (DOCKER / name).read_text()
    lines = [
        line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    ignore = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == {
        p for line in lines for p in line
    }


def test_the_example_job_reports(stack: Stack, tmp_path: Path) -> None:
    """The example, started by torchrun on two ranks, is known to the server afterwards, as ended."""
    token = tmp_path / "token"
    token.write_text(WRITE_TOKEN + "\n")
    environment = os.environ | {
        "NOISESCALE_REPORT_TO": stack.server.url,
        "NOISESCALE_RUN": "example",
        "NOISESCALE_TOKEN_FILE": str(token),
        "STEPS": "100",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    answer = subprocess.run(
        [*command, str(DOCKER / "examples" / "train.py")],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    run = stack.server.get("/v1/runs/example", Authorization=f"Bearer {READ_TOKEN}").json()
    assert (run["state"], run["global_batch_size"]) == ("ended", 64)
    assert 0 < run["steps"] <= 100  # the last ones may not have been measured
