"""Does what a line of shell on a page says, or, where that needs another machine, checks what it names.

What needs a container engine, a cluster, Slurm or a package index is not run: the files it names must be
there, and the project's own words in it must be right. A line that nobody here knows is a fault.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from noisescale_server.settings import Settings
from tests.docs.pages import ROOT
from tests.services import Server, free_port, http, required_tool, stop, wait_until

URL = "http://127.0.0.1:8000"
ANY_SERVER = re.compile(r"http://[\w.-]+:8000")
POSTGRES = "postgresql://"
BIN = Path(sys.executable).parent
# Of the client and of the example job.
OTHER_VARIABLES = {"NOISESCALE_URL", "NOISESCALE_TOKEN", "NOISESCALE_REPORT_TO", "NOISESCALE_RUN", "NOISESCALE_TOKEN_FILE"}  # noqa: E501  # fmt: skip
SHORT = "20"
"""Steps that a training command on a page is cut to."""


@dataclass
class Shell:
    """Where the lines run.

    Attributes:
        server: Stands where the pages say port 8000.
        postgres: Answers the URL of a PostgreSQL of its own.
        folder: An empty one to run in.
    """

    server: Server
    postgres: Callable[[], str]
    folder: Path
    exported: dict[str, str] = field(default_factory=dict)

    def run_block(self, text: str) -> None:
        """Every line of a block, in order."""
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                self.run(line)

    def run(self, line: str) -> str:
        """One line; what it printed, where it was really run."""
        variables, words = _split(line)
        for name in variables:
            assert name in known_variables() or not name.startswith("NOISESCALE_"), (
                f"there is no {name}: {line}"
            )
        if not words:
            self.exported |= variables
            return ""
        handler = HANDLERS.get(words[0])
        assert handler is not None, f"nobody here knows how to check this line: {line}"
        return handler(self, words, self.exported | variables)

    def call(self, command: list[str], variables: dict[str, str]) -> str:
        """Really run a command; it must succeed."""
        variables = {name: self._here(value) for name, value in variables.items()}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NOISESCALE_")}
        environment |= {"NOISESCALE_URL": self.server.url, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            [self._here(word) for word in command],
            env=environment | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def _here(self, word: str) -> str:
        """With our server's address and our database for the page's."""
        if word.startswith(POSTGRES):
            return self.postgres()
        return ANY_SERVER.sub(self.server.url, word)


def known_variables() -> set[str]:
    """Every environment variable of ours that means something."""
    settings = {f"NOISESCALE_{name.upper()}" for name in Settings.model_fields}
    return settings | {f"{name}_FILE" for name in settings} | OTHER_VARIABLES


def _split(line: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a line sets, and the words of its command, without where its output goes."""
    words = shlex.split(line, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    if words and words[0] == "export":
        words = words[1:]
    variables = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


def _client(shell: Shell, words: list[str], variables: dict[str, str]) -> str:
    if words[1] == "demo":  # a minute; tests/client/test_demo.py runs it
        known = shell.call(["noisescale", "demo", "--help"], {"COLUMNS": "200"})
        for word in words[2:]:
            assert not word.startswith("--") or word in known, f"the demo has no {word}"
        return ""
    printed = shell.call(words, variables)
    assert printed.strip(), f"{shlex.join(words)} printed nothing"
    return printed


def _server(shell: Shell, words: list[str], variables: dict[str, str]) -> str:
    if words[1:3] == ["token", "revoke"]:  # of one that is there
        variables = _with_database(shell, variables)
        shell.call(["noisescale-server", "token", "create", "page"], variables)
        listed = shell.call(["noisescale-server", "token", "list"], variables)
        words = [*words[:3], listed.splitlines()[-1].split()[0]]
    if words[1] == "backup":  # of one that is there
        shell.call(["noisescale-server", "stats"], _with_database(shell, variables))
    if words[1] != "serve":
        return shell.call(words, _with_database(shell, variables))
    port = free_port()
    command = [word for word in words if word not in ("--port", "8000")] + ["--port", str(port)]
    environment = os.environ | _with_database(shell, variables)
    environment = {name: shell._here(value) for name, value in environment.items()}
    if POSTGRES in variables.get("NOISESCALE_DATABASE_URL", ""):
        shell.call(["noisescale-server", "migrate"], variables)
    process = subprocess.Popen([str(BIN / command[0]), *command[1:]], env=environment, cwd=shell.folder)

    def ready() -> bool:
        assert process.poll() is None, f"{shlex.join(words)} ended"
        try:
            return http("GET", f"http://127.0.0.1:{port}/readyz").status == 200
        except OSError:
            return False

    try:
        wait_until(ready, what=f"an answer of {shlex.join(words)}")
    finally:
        stop(process)
    return ""


def _with_database(shell: Shell, variables: dict[str, str]) -> dict[str, str]:
    """A database in the shell's folder, where the line names none, or one elsewhere."""
    url = variables.get("NOISESCALE_DATABASE_URL", "")
    if url.startswith(POSTGRES):
        return variables
    return variables | {"NOISESCALE_DATABASE_URL": f"sqlite:///{shell.folder / 'noisescale.db'}"}


def _curl(shell: Shell, words: list[str], variables: dict[str, str]) -> str:
    required_tool("curl")
    printed = shell.call(["curl", "--silent", "--show-error", "--fail-with-body", *words[1:]], variables)
    assert printed.strip()
    return printed


def _pip(_: Shell, words: list[str], __: dict[str, str]) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    ours = [word for word in words if word.startswith(project["name"])]
    for word in ours:
        named = re.fullmatch(r"noisescale(?:\[([\w,]+)\])?", word)
        assert named, word
        assert set((named[1] or "").split(",")) - {""} <= extras, f"{word} names an extra that there is not"
    assert ours, words
    return ""


def _make(_: Shell, words: list[str], __: dict[str, str]) -> str:
    makefile = (ROOT / "Makefile").read_text()
    for target in words[1:]:
        assert f"\n{target}:" in makefile, f"the Makefile has no target {target}"
    return ""


def _python(shell: Shell, words: list[str], variables: dict[str, str]) -> str:
    if words[1:3] == ["-m", "venv"]:
        return ""
    assert words[1] == "-m", words
    if words[2] == "torch.distributed.run":
        return _torchrun(shell, words[2:], variables)
    assert importlib.util.find_spec(words[2]) is not None, f"there is no module {words[2]}"
    return ""


def _torchrun(shell: Shell, words: list[str], variables: dict[str, str]) -> str:
    """A module of ours is run, for a few steps; a script is one of the page's programs, run by themselves."""
    if "-m" not in words:
        assert any(word.endswith(".py") for word in words), words
        return ""
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:], "--steps", SHORT]
    return shell.call(command, variables | {"OMP_NUM_THREADS": "1"})


def _files(_: Shell, words: list[str], __: dict[str, str]) -> str:
    """What a command of another machine names under docker/ must be there."""
    for word in words[1:]:
        if word.startswith(("docker/", "./docker/")):
            assert (ROOT / word).exists(), f"there is no {word}"
    return ""


def _script(_: Shell, words: list[str], __: dict[str, str]) -> str:
    assert os.access(ROOT / words[0], os.X_OK), f"{words[0]} cannot be run"
    return ""


HANDLERS: dict[str, Callable[[Shell, list[str], dict[str, str]], str]] = {
    "noisescale": _client,
    "noisescale-server": _server,
    "curl": _curl,
    "pip": _pip,
    "make": _make,
    "python": _python,
    "python3": _python,
    "torchrun": _torchrun,
    "docker": _files,
    "helm": _files,
    "kubectl": _files,
    "sbatch": _files,
    "cp": _files,
    "install": _files,
    "systemctl": _files,
    "docker/make-secrets.sh": _script,
}


def matches(expected: str, printed: str) -> bool:
    """Whether an output is the expected one, whatever its spaces; a line `...` stands for any lines."""
    parts = [" ".join(part.split()) for part in re.split(r"^\.\.\.$", expected, flags=re.MULTILINE)]
    pattern = ".*".join(re.escape(part) + r"\s*" for part in parts)
    return re.fullmatch(pattern, " ".join(printed.split()), flags=re.DOTALL) is not None
