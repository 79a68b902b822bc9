"""The monitor: what a training job holds of noisescale."""

import atexit
import os
import time
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from pydantic import ValidationError

from noisescale.advice import Recommendation, WhatIf
from noisescale.errors import InvalidInputError, StateError
from noisescale.estimate import Estimate
from noisescale.hooks.reporter import Reporter
from noisescale.recommend import recommend_run

EXIT_TIMEOUT_S = 2.0
"""How long the end of the process may wait for the last report."""

EXIT_GRACE_S = 0.1
"""How long the end of the process lets gloo's threads drop the last gradients they hold. One that
does so after the interpreter has begun to end aborts the process (pytorch/pytorch#179291), with
noisescale or without."""


class Capture(Protocol):
    """Where the gradients are taken; one per kind of model."""

    @property
    def passes(self) -> int:
        """Synchronised backward passes since attaching."""

    def collect(self, *, timeout_s: float) -> bool:
        """Read what has been measured and is still on its way; whether all of it was, in time."""

    def leave(self) -> None:
        """Stop measuring."""

    def detach(self) -> None:
        """Stop measuring, and leave the model and the optimizer as they were found."""


class Monitor:
    """Measures the noise scale of one model's training; `noisescale.attach` makes it.

    Every rank has one. Rank 0's knows the measurements and reports them; the others' take part in
    measuring, and report nothing.

    Attributes:
        run: The run's name.
    """

    def __init__(self, capture: Capture, reporter: Reporter, *, run: str) -> None:
        self.run = run
        self._capture = capture
        self._reporter = reporter
        self._closed = False
        self._pid = os.getpid()
        atexit.register(_close_at_exit, weakref.ref(self))

    @property
    def attempt(self) -> int:
        """Which start of the job this is: milliseconds since 1970; later than any that it goes on from."""
        return self._reporter.attempt

    def estimate(self) -> Estimate:
        """The noise scale of the current regime (one batch size, one smooth stretch of LR).

        On rank 0; elsewhere empty, with measured_steps 0. Never waits.
        """
        self._capture.collect(timeout_s=0.0)
        return self._reporter.estimate()

    def recommend(self, **what_if: Any) -> Recommendation:
        """Batch and learning rate by what was measured, with reasons. On rank 0.

        Args:
            what_if: Fields of noisescale.advice.WhatIf, to suppose what is not so:
                `target_dp_world_size=8`.

        Raises:
            NotMeasuredError: Nothing has been measured yet, or this is not rank 0.
            InvalidInputError: No such field, or a value that cannot be right.
            ContradictionError: Two fields disagree.
        """
        try:
            supposed = WhatIf.model_validate(what_if)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise InvalidInputError(f"recommend({field}=...): {first['msg']}", field=field) from error
        self._capture.collect(timeout_s=0.0)
        return recommend_run(self._reporter.blocks(), self._reporter.info(), what_if=supposed)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Send all that was measured and wait for its delivery; whether that came, in time."""
        deadline = time.monotonic() + timeout_s
        read = self._capture.collect(timeout_s=timeout_s)
        delivered = self._reporter.flush(max(0.0, deadline - time.monotonic()))
        return read and delivered

    def close(self, timeout_s: float = 10.0) -> bool:
        """Measure no more, send the rest and say that the run has ended; whether that was delivered.

        What was measured can still be asked for. Closing twice does nothing. The end of the
        process closes too.
        """
        if self._closed or os.getpid() != self._pid:
            return True
        self._closed = True
        deadline = time.monotonic() + timeout_s
        read = self._capture.collect(timeout_s=timeout_s)
        self._capture.leave()
        delivered = self._reporter.close(max(0.0, deadline - time.monotonic()))
        return read and delivered

    def detach(self, timeout_s: float = 10.0) -> None:
        """Close, and leave the model and the optimizer as they were found.

        PyTorch has no way to take a comm hook off a DDP model: it stays, does what DDP does
        without one, and attaching again uses it.
        """
        self.close(timeout_s)
        self._capture.detach()

    def state_dict(self) -> dict[str, Any]:
        """To put into a checkpoint, on rank 0; empty elsewhere.

        Plain numbers, strings, lists and dicts: `torch.load(weights_only=True)` takes it. Waits
        for what is on its way, a step at most.
        """
        self._capture.collect(timeout_s=60.0)
        return self._reporter.state(passes=self._capture.passes) or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state_dict() left off; call it before the first step, on any rank or all.

        Raises:
            StateError: It is of a later version, counts another batch unit, or is no such state.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"load_state_dict() takes what state_dict() gave, got a {type(state).__name__}")
        if state:
            self._reporter.restore(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_at_exit(monitor: "weakref.ref[Monitor]") -> None:
    alive = monitor()
    if alive is not None:
        alive.close(EXIT_TIMEOUT_S)
        time.sleep(EXIT_GRACE_S)
