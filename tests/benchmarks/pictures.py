"""Draws the pictures of docs/reading.md from real runs; takes about three minutes.

    python -m tests.benchmarks.pictures               # into docs/images
    python -m tests.benchmarks.pictures --only early

Each is a run of the digits job, two ranks, that reports to a server of its own; what is drawn is what the
server answers. The figures are printed too: the page's words must fit them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from noisescale_client import NoiseScaleClient
from noisescale_client.picture import save_picture
from tests.services import Server, running_server

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@dataclass(frozen=True, slots=True)
class Scene:
    """One run of the digits job."""

    steps: int
    local_batch_size: int
    learning_rate: float


SCENES = {
    "early": Scene(steps=100, local_batch_size=4, learning_rate=0.02),
    "far-above": Scene(steps=3000, local_batch_size=8, learning_rate=0.05),
    "about": Scene(steps=1200, local_batch_size=96, learning_rate=0.05),
    "far-below": Scene(steps=400, local_batch_size=512, learning_rate=0.05),
}


def draw(name: str, scene: Scene, *, server: Server, folder: Path) -> str:
    """Train, draw, and say what came out."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "noisescale.hooks.digits", "--report-to", server.url, "--run-name", name),
        *("--steps", str(scene.steps), "--local-batch-size", str(scene.local_batch_size)),
        *("--learning-rate", str(scene.learning_rate)),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"OMP_NUM_THREADS": "1"})
    with NoiseScaleClient(server.url) as client:
        answer = client.recommend(name)
        save_picture(client.series(name), answer, folder / f"reading-{name}.png")
    return f"{name}: {answer.explanation}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SCENES, help="draw this one")
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder (default: docs/images)")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        for name, scene in SCENES.items():
            if options.only in (None, name):
                sys.stdout.write(draw(name, scene, server=server, folder=options.output) + "\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
