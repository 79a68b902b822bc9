"""A training run's progress: a bar with a live line in a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich import progress as bars
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from noisescale.wire import RunDetail
from noisescale_client.tables import interval_in_words

PLAIN_EVERY_S = 5.0
"""How often a plain line is written where there is no terminal to redraw."""


class Progress(Protocol):
    """Shows how far a run is and what its noise scale is."""

    def show(self, run: RunDetail) -> None:
        """The run as the server knows it now."""


@contextmanager
def progress_on(console: Console, *, steps: int) -> Iterator[Progress]:
    """The progress display that fits the console."""
    if not console.is_terminal:
        yield _PlainProgress(console, steps=steps)
        return
    shown = _LiveProgress(console, steps=steps)
    with shown.live:
        yield shown


class _LiveProgress:
    def __init__(self, console: Console, *, steps: int) -> None:
        self._bars = bars.Progress(
            bars.TextColumn("training"),
            bars.BarColumn(bar_width=None),
            bars.MofNCompleteColumn(),
            bars.TextColumn("steps"),
            bars.TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bars.add_task("training", total=steps)
        self._line = Text("waiting for the first steps", style="dim")
        self.live = Live(Group(self._bars, self._line), console=console, refresh_per_second=8)

    def show(self, run: RunDetail) -> None:
        self._bars.update(self._task, completed=_steps_done(run))
        self._line = Text.assemble(
            "noise scale ", (_scale(run), "bold blue"), "   ", _batch(run), style="default"
        )
        self.live.update(Group(self._bars, self._line))


class _PlainProgress:
    def __init__(self, console: Console, *, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._said_at = float("-inf")
        self._said_steps = 0

    def show(self, run: RunDetail) -> None:
        done = _steps_done(run)
        finished = done >= self._steps
        if done == self._said_steps or (not finished and time.monotonic() - self._said_at < PLAIN_EVERY_S):
            return
        self._said_at, self._said_steps = time.monotonic(), done
        self._console.print(f"step {done}/{self._steps}  noise scale {_scale(run)}  {_batch(run)}")


def _steps_done(run: RunDetail) -> int:
    return 0 if run.last_step is None else run.last_step + 1


def _scale(run: RunDetail) -> str:
    words = interval_in_words(noise_scale=run.noise_scale, lower=run.lower, upper=run.upper)
    return f"{words} {run.batch_unit}" if run.lower else words


def _batch(run: RunDetail) -> str:
    words = f"batch {run.global_batch_size:g}" if run.global_batch_size is not None else ""
    return f"{words}   advice: {run.action} ({(run.reason or '').replace('_', ' ')})" if run.action else words
