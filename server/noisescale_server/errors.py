"""The server's own errors.

    NoiseScaleError
    ├── UnknownRunError          no run of that name; knows the nearest ones
    ├── BadRunError              what a run reported cannot be evaluated
    ├── TooManyRunsError         the database may hold no further run, or none of that token
    ├── TooManyGroupsError       the run may have no further layer group
    ├── UnknownTokenError        no token of that id
    ├── QueueFullError           more reports are waiting than may
    ├── StoreUnavailableError    the database did not take or give what it was asked to
    ├── MigrationNeededError     the database's tables are another version's
    └── StartError               these settings do not go together

What each is in HTTP is said in noisescale_server.api.errors.
"""

import difflib
from collections.abc import Sequence

from noisescale.errors import NoiseScaleError


class UnknownRunError(NoiseScaleError):
    """No run of that name.

    Attributes:
        nearest: Known runs with the most similar names, at most 5.
    """

    def __init__(self, run: str, *, known: Sequence[str]) -> None:
        self.run = run
        self.nearest = difflib.get_close_matches(run, known, n=5, cutoff=0.4)
        hint = f"the nearest known: {', '.join(self.nearest)}" if self.nearest else "GET /v1/runs lists all"
        super().__init__(f"there is no run of that name; {hint}")


class BadRunError(NoiseScaleError):
    """What a run reported cannot be evaluated.

    Attributes:
        run: Its name.
    """

    def __init__(self, run: str) -> None:
        super().__init__(
            "what this run reported cannot be evaluated; the server's log has the reason, and the next "
            "reports may set it right"
        )
        self.run = run


class TooManyRunsError(NoiseScaleError):
    """The database may hold no further run, or none that one token makes.

    Attributes:
        most: How many it may.
        of_token: Whether it is the token's limit.
    """

    def __init__(self, *, most: int, of_token: bool = False) -> None:
        whose, setting = ("of one token ", "MAX_RUNS_PER_TOKEN") if of_token else ("", "MAX_RUNS")
        super().__init__(
            f"this server keeps at most {most} runs {whose}and has them; report to a known run, remove old "
            f"ones, or raise NOISESCALE_{setting}"
        )
        self.most = most
        self.of_token = of_token


class TooManyGroupsError(NoiseScaleError):
    """The run may have no further layer group.

    Attributes:
        most: Layer groups times geometries that it may have.
    """

    def __init__(self, *, most: int) -> None:
        super().__init__(
            f"sums: a run may have at most {most} layer groups times geometries over all its blocks, and "
            f"this report brings more; group more coarsely, as another run, or raise NOISESCALE_MAX_GROUPS"
        )
        self.most = most


class UnknownTokenError(NoiseScaleError):
    """No token of that id."""

    def __init__(self, token_id: str) -> None:
        self.token_id = token_id
        super().__init__("there is no token of that id; `noisescale-server token list` shows all")


class QueueFullError(NoiseScaleError):
    """More reports are waiting to be committed than may; the same report may be sent again later."""

    def __init__(self, *, waiting: int) -> None:
        super().__init__(
            f"{waiting} reports are waiting to be stored already; send this one again in a second"
        )


class StoreUnavailableError(NoiseScaleError):
    """The database did not take or give what it was asked to; nothing of it is stored."""

    def __init__(self) -> None:
        super().__init__(
            "the database does not answer now; nothing was stored, send it again in a few seconds"
        )


class MigrationNeededError(NoiseScaleError):
    """The database's tables are another version's."""

    def __init__(self, *, found: str | None, expected: str | None) -> None:
        super().__init__(
            f"the database is at schema {found or 'none'} and this version needs {expected}; "
            f"run `noisescale-server migrate` once, then start again"
        )


class StartError(NoiseScaleError):
    """These settings do not go together."""
