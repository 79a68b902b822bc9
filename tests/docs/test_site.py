"""The documentation is built without a warning, and has all of the program in it."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from noisescale_server import Settings, create_app
from noisescale_server.exposition import families
from noisescale_server.process_metrics import ProcessMetrics
from tests.docs.pages import DOCS, PAGES, ROOT, text_of

pytestmark = pytest.mark.timeout(600)

NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PITFALLS = 34


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def words(site: Path) -> str:
    """All that a reader of the site can find, as text."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in site.glob("*.html"))
    return unescape(re.sub(r"<[^>]+>", "", text))


def names(text: str) -> set[str]:
    """The words of a text that could be names."""
    return set(re.findall(r"[A-Za-z_][\w.-]*", text))


def test_every_metric_is_documented(words: str) -> None:
    """Each family that the server exposes, of runs and of itself."""
    found = [family.name for family in families([])]
    found += [f.name for f in ProcessMetrics().registry.collect() if f.name.startswith("noisescale")]
    assert len(found) > 20
    suffixes = ("", "_total", "_info")
    assert [name for name in found if not names(words) & {name + end for end in suffixes}] == []


def test_every_setting_is_documented(words: str) -> None:
    """Each by the environment variable that sets it."""
    wanted = {f"NOISESCALE_{name.upper()}" for name in Settings.model_fields}
    assert wanted - names(words) == set()


def test_every_command_and_option_is_documented(words: str) -> None:
    """Each command of both programs, as its own --help lists it."""
    for program in ("noisescale", "noisescale-server"):
        for command in subcommands([program]):
            assert " ".join(command) in words
            missing = set(re.findall(r"--[a-z][\w-]*", help_of(command))) - {"--help"} - options(words)
            assert missing == set(), f"{' '.join(command)}: {missing}"


def options(text: str) -> set[str]:
    """Everything that looks like an option."""
    return set(re.findall(r"--[a-z][\w-]*", text))


def subcommands(command: list[str]) -> Iterator[list[str]]:
    """The commands below a command, as its own help lists them; itself where there are none."""
    listed = re.search(r"─ Commands ─.*?╰", help_of(command), flags=re.DOTALL)
    if listed is None:
        yield command
        return
    for name in re.findall(r"^│ ([a-z][\w-]*)", listed[0], flags=re.MULTILINE):
        yield from subcommands([*command, name])


def help_of(command: list[str]) -> str:
    """What --help prints, wide enough that no option is broken."""
    program = str(Path(sys.executable).parent / command[0])
    answer = subprocess.run(
        [program, *command[1:], "--help"],
        capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "250"},
    )  # fmt: skip
    return answer.stdout


def test_every_endpoint_and_field_is_documented(words: str) -> None:
    """Each path with its methods and parameters, and each field of each model, of the OpenAPI document."""
    document = create_app(Settings(database_url="sqlite:///:memory:")).openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in words
            for parameter in operation.get("parameters", []):
                assert parameter["name"] in names(words), (path, parameter["name"])
    for name, schema in document["components"]["schemas"].items():
        assert set(schema.get("properties", {})) <= names(words), name


def test_every_public_name_is_documented(site: Path) -> None:
    """Each name of `__all__` has an entry that can be linked to."""
    import noisescale
    import noisescale_client
    import noisescale_server

    page = (site / "python-api.html").read_text(encoding="utf-8")
    for package in (noisescale, noisescale_client, noisescale_server):
        for name in package.__all__:
            assert f'id="{package.__name__}.{name}"' in page, f"{package.__name__}.{name}"


def test_the_pitfalls_name_tests_that_exist() -> None:
    """Every pitfall once, each with a test of this tree, or said to have none yet."""
    text = (DOCS / "pitfalls.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", text, flags=re.MULTILINE)
    assert sorted(int(number) for number, _ in rows) == list(range(1, PITFALLS + 1))
    for number, caught_by in rows:
        named = NAMED_TEST.findall(caught_by)
        assert named or caught_by == "none yet", number
        for path, test in named:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert test in functions, f"pitfall {number}: there is no {path}::{test}"


def test_links_lead_somewhere() -> None:
    """Every relative link and picture of a page is a file of the repository; Sphinx checks the anchors."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(page)):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_files_that_pages_name_exist() -> None:
    """Every path under docker/ or tests/ in backticks is there."""
    for page in PAGES:
        for path in re.findall(r"`((?:docker|tests|docs)/[\w./-]+)(?:::\w+)?`", text_of(page)):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_every_picture_is_shown() -> None:
    """No picture lies about that no page shows."""
    shown = {Path(link).name for page in PAGES for link in re.findall(r"!\[.*?\]\(([^)]+)\)", text_of(page))}
    assert {path.name for path in (DOCS / "images").iterdir()} <= shown
