"""Real gloo ranks that live through many tests: starting one costs seconds, a test far less."""

import faulthandler
import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CASE_S = 90.0
"""How long the ranks may take over one case: more means that they wait for each other."""


class RanksFailedError(AssertionError):
    """A rank raised, died or hung; says which, and where."""


@dataclass(frozen=True)
class Rank:
    """What a case is told of where it runs.

    Attributes:
        folder: The same on all ranks, empty when the case begins.
    """

    rank: int
    world_size: int
    folder: Path


class Ranks:
    """So many processes, joined by gloo, that run the same function at the same time."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, case: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Call `case(rank, **arguments)` on every rank; what each returned, by rank.

        Args:
            case: A function of a module's top level.

        Raises:
            RanksFailedError: One raised, died or took too long. The next run has new processes.
        """
        if not self._workers:
            self._start()
        with tempfile.TemporaryDirectory(prefix="ns-case-") as folder:
            for _, pipe in self._workers:
                pipe.send((case.__module__, case.__qualname__, folder, arguments))
            answers = [self._answer(rank) for rank in range(self.world_size)]
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        if failed:
            self.stop()
            raise RanksFailedError("\n".join(failed))
        return [value for value, _ in answers]

    def stop(self) -> None:
        """End the processes."""
        for process, pipe in self._workers:
            pipe.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        meeting = Path(tempfile.mkdtemp(prefix="ns-ranks-")) / "store"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, self.world_size, str(meeting), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _answer(self, rank: int) -> tuple[Any, str | None]:
        process, pipe = self._workers[rank]
        try:
            if not pipe.poll(CASE_S):
                return None, f"no answer within {CASE_S} s"
            answer: tuple[Any, str | None] = pipe.recv()
        except EOFError:
            process.join(5)
            return None, f"died with exit code {process.exitcode}"
        return answer


def _work(rank: int, world_size: int, meeting: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(10 * CASE_S, exit=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=CASE_S),
    )
    while True:
        try:
            module, name, folder, arguments = pipe.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            case = getattr(importlib.import_module(module), name)
            pipe.send((case(Rank(rank, world_size, Path(folder)), **arguments), None))
        except BaseException:  # noqa: BLE001  told to the test, which fails
            pipe.send((None, traceback.format_exc()))
        faulthandler.dump_traceback_later(10 * CASE_S, exit=True)
    dist.destroy_process_group()
