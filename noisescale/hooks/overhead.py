"""How often to measure, so that measuring stays cheap.

Rank 0 alone times itself and decides; the number travels to the others in the packet, for a
number that each rank settled from its own clock would have them wait for each other for ever.
"""

import math
import statistics
from collections import deque

from noisescale.errors import InvalidInputError

WARM_UP_PASSES = 5
"""First passes that are not timed: they allocate, compile and connect."""

WINDOW = 31
"""Latest timings whose median counts."""

MIN_TIMINGS = 10
"""Timings before anything is decided."""

MAX_EVERY = 1000

DEAD_BAND = 1.25
"""A wish within this factor of what holds now changes nothing."""


class OverheadMeter:
    """Times measuring against the steps, and says every how many steps to measure.

    The cost is the host's time in measuring. On a CPU that is all there is; on an accelerator the
    norms run beside the host, and the host's time stands in for theirs.

    Args:
        every: A number of steps, or "auto" to keep the cost's share of the step time under
            max_overhead.
        max_overhead: The largest share, between 0 and 1.

    Raises:
        InvalidInputError: Either cannot be right.
    """

    def __init__(self, every: int | str, *, max_overhead: float) -> None:
        if not 0 < max_overhead <= 1:
            raise InvalidInputError(
                f"max_overhead is a share of the step time, above 0 and up to 1, got {max_overhead!r}",
                field="max_overhead",
            )
        self.auto = every == "auto"
        if not self.auto and (isinstance(every, bool | str) or every < 1):
            raise InvalidInputError(
                f'every is "auto" or a number of steps of at least 1, got {every!r}', field="every"
            )
        self.every = 1 if isinstance(every, str) else int(every)
        self._max_overhead = max_overhead
        self._costs: deque[float] = deque(maxlen=WINDOW)
        self._steps: deque[float] = deque(maxlen=WINDOW)
        self._passes = 0
        self._last_pass_at: float | None = None

    def passed(self, at: float) -> None:
        """A step began at this time, in seconds."""
        self._passes += 1
        if self._last_pass_at is not None and self._passes > WARM_UP_PASSES:
            self._steps.append(at - self._last_pass_at)
        self._last_pass_at = at

    def measured(self, cost_s: float) -> None:
        """Measuring one step took this long; decides anew."""
        if self._passes <= WARM_UP_PASSES:
            return
        self._costs.append(cost_s)
        if not self.auto or min(len(self._costs), len(self._steps)) < MIN_TIMINGS:
            return
        step = self._plain_step_s()
        wish = MAX_EVERY
        if step > 0:
            wish = min(MAX_EVERY, max(1, math.ceil(self._cost_s() / (self._max_overhead * step))))
        if not self.every / DEAD_BAND <= wish <= self.every:
            self.every = wish

    def resume(self, every: int) -> None:
        """Begin with what an earlier run of the job had settled on, where that is left to the meter."""
        if self.auto:
            self.every = min(MAX_EVERY, max(1, every))

    @property
    def share(self) -> float | None:
        """Measuring's share of the step time, as things are; None before enough was timed."""
        if min(len(self._costs), len(self._steps)) < MIN_TIMINGS:
            return None
        step = self._plain_step_s()
        return self._cost_s() / self.every / step if step > 0 else None

    def _cost_s(self) -> float:
        return statistics.median(self._costs)

    def _plain_step_s(self) -> float:
        """The step without measuring; while every step is measured, the cost is in it."""
        step = statistics.median(self._steps)
        return max(step - self._cost_s(), 0.0) if self.every == 1 else step
