"""The benchmark that is for a GPU runs on a CPU too, and its comparison with float64 has teeth."""

import subprocess
import sys

SHORT = ["--device", "cpu", "--small", "--rounds", "1", "--steps", "2", "--warm-up", "2"]


def run(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """The benchmark in a process of its own.

    Args:
        before: Done before, in that process.
    """
    program = f"{before}\nfrom tests.benchmarks.gpu_overhead import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def test_both_models_are_measured_and_right() -> None:
    """With --device cpu --small: a table a model, each variant's square norms those of float64."""
    done = run(*SHORT)
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith(("| plain", "| every", "| micro-batch"))
    ]
    assert [row[0] for row in rows].count("plain") == 2
    assert len(rows) == 12
    measured = [row for row in rows if not row[0].startswith("plain")]
    assert all(float(row[-1]) < 1e-5 for row in measured)
    assert all(float(row[1]) > 0 for row in rows)


WRONG = """
from noisescale.hooks import groups
right = groups.square_norm
groups.square_norm = lambda values: right(values) * 1.0001
"""


def test_a_wrong_square_norm_is_noticed() -> None:
    """Norms that are a ten-thousandth too large: exit status 1, and why."""
    done = run(*SHORT, "--models", "bf16 matrices", "--variants", "every=1", before=WRONG)
    assert done.returncode == 1, done.stderr
    assert "off by more than 1e-05" in done.stderr
