"""What users may import, and what importing costs."""

import subprocess
import sys

import noisescale


def test_the_public_names_are_pinned() -> None:
    """Adding or removing one is a decision, seen here."""
    assert sorted(noisescale.__all__) == sorted(set(noisescale.__all__))
    assert {"attach", "Monitor", "NoiseScaleError"} <= set(noisescale.__all__)


def test_import_needs_neither_torch_nor_the_web() -> None:
    """With torch, FastAPI and friends forbidden, the pure part still imports."""
    forbidden = [
        "torch",
        "fastapi",
        "starlette",
        "sqlalchemy",
        "prometheus_client",
        "urllib3",
        "typer",
        "numpy",
    ]
    code = (
        "import sys\n"
        f"for name in {forbidden!r}: sys.modules[name] = None\n"
        "import noisescale, noisescale.recommend, noisescale.estimate, noisescale.wire, noisescale.sinks\n"
        "print(noisescale.__all__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "attach" in done.stdout


def test_attach_without_torch_says_what_to_install() -> None:
    """A clear error, not an obscure one."""
    code = "import sys; sys.modules['torch'] = None; import noisescale; noisescale.attach"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "noisescale[torch]" in done.stderr
