"""Faults on purpose: functions of noisescale.hooks that raise, to see what becomes of training."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any


class Fault:
    """Makes one function of noisescale.hooks raise, from when it is told to."""

    def __init__(self) -> None:
        self.on = False
        self.raised = 0

    @contextlib.contextmanager
    def inside(self, where: str) -> Iterator[None]:
        """Meanwhile.

        Args:
            where: The function's name behind "noisescale.hooks.", "geometry.sampled.Class.method" too.
        """
        owner, name = _find(where)
        real = getattr(owner, name)

        def failing(*arguments: Any, **named: Any) -> Any:
            if self.on:
                self.raised += 1
                raise RuntimeError("injected")
            return real(*arguments, **named)

        setattr(owner, name, failing)
        try:
            yield
        finally:
            setattr(owner, name, real)


def _find(where: str) -> tuple[Any, str]:
    """The module or class, and the name in it."""
    parts = where.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module("noisescale.hooks." + ".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise LookupError(where)
