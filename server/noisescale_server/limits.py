"""How many requests one sender may make in a second."""

import math
import time
from collections.abc import Callable

from noisescale_server.api_errors import ApiError

_BURST_S = 2.0
_MOST_SENDERS = 10_000


class RequestRates:
    """A bucket of requests for each sender, filled at a steady rate; of this process alone.

    Args:
        per_s: Requests that a sender may make in a second, and twice as many at once; 0: any number.
        clock: Seconds that never go back.
    """

    def __init__(self, *, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * _BURST_S)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, sender: str) -> None:
        """Count one request.

        Args:
            sender: The id of a token, or the address of a client that has none.

        Raises:
            ApiError: 429, with the seconds until there is room again.
        """
        if not self._per_s:
            return
        now = self._clock()
        left, since = self._buckets.pop(sender) if sender in self._buckets else self._fresh(now)
        left = min(self._most, left + (now - since) * self._per_s)
        if left < 1:
            self._buckets[sender] = (left, now)
            raise ApiError(
                429,
                "too_many_requests",
                f"one token, or one address without a token, may make {self._per_s:g} requests a second, and "
                f"this one made more; ask less often, share the load over several tokens, or raise "
                f"NOISESCALE_MAX_REQUESTS_PER_S",
                headers={"Retry-After": str(math.ceil((1 - left) / self._per_s))},
            )
        self._buckets[sender] = (left - 1, now)

    def _fresh(self, now: float) -> tuple[float, float]:
        if len(self._buckets) >= _MOST_SENDERS:
            del self._buckets[next(iter(self._buckets))]  # the one that asked longest ago
        return self._most, now
