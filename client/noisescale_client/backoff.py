"""How long to wait before the next try."""

import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LONGEST_RETRY_AFTER_S = 300.0
"""A server that asks for more than this is asked again after this."""


def backoff_s(tries: int, *, first_s: float = FIRST_WAIT_S, longest_s: float = LONGEST_WAIT_S) -> float:
    """Seconds to wait after `tries` failed tries (1 or more): doubling, capped, with jitter.

    Between half and all of the doubled wait, so that many jobs that lost one server do not
    come back in the same instant.
    """
    doubled = min(longest_s, first_s * 2.0 ** min(tries - 1, 60))
    return doubled * random.uniform(0.5, 1.0)  # noqa: S311  spreads load, keeps no secret


def retry_after_s(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """What the answer's Retry-After asks for, in seconds; None where there is none to be read.

    Either form of RFC 9110 section 10.2.3, a number of seconds or a date, within 0 and
    LONGEST_RETRY_AFTER_S.
    """
    value = headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return min(LONGEST_RETRY_AFTER_S, float(value[:9]))
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    seconds = (when - (now or datetime.now(UTC))).total_seconds()
    return min(LONGEST_RETRY_AFTER_S, max(0.0, seconds))
