"""Questions to a noisescale server: which runs there are, how they stand, what to do."""

from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ValidationError

from noisescale.advice import Recommendation, RecommendRequest, WhatIf
from noisescale.blocks import TOTAL, Geometry
from noisescale.errors import InvalidInputError
from noisescale.wire import RunDetail, RunList, RunSummary, Series
from noisescale_client.answers import Model, read
from noisescale_client.transport import DEFAULT_URL, Transport, check_url


class NoiseScaleClient:
    """Asks one server.

    Safe to use from one thread at a time; a context manager that closes its connections.

    Args:
        url: The server's.
        token: Read token; None reads NOISESCALE_TOKEN.
        timeout_s: Longest wait for a connection, and then for the next piece of an answer.

    Raises:
        InvalidInputError: The URL cannot be right.

    Every method raises ServerUnreachableError where there is no answer, RequestRefusedError (or
    its UnauthorizedError, UnknownRunError) where the answer is an error, and
    UnexpectedAnswerError where it is not a noisescale server's.
    """

    def __init__(self, url: str = DEFAULT_URL, token: str | None = None, timeout_s: float = 10.0) -> None:
        self.url = check_url(url)
        self._transport = Transport(
            self.url, token=token, connect_timeout_s=timeout_s, read_timeout_s=timeout_s
        )

    def runs(self, *, name_contains: str | None = None, limit: int = 100) -> list[RunSummary]:
        """The runs that the server knows, the one that reported last first.

        Args:
            name_contains: Only runs with this in their name.
            limit: At most so many; the server allows 1000.
        """
        return self._get(RunList, "/v1/runs", {"name_contains": name_contains, "limit": limit}).runs

    def run(self, name: str) -> RunDetail:
        """All that is known of one run."""
        return self._get(RunDetail, f"/v1/runs/{quote(name, safe='')}")

    def series(
        self,
        name: str,
        *,
        group: str = TOTAL,
        geometry: Geometry = "euclidean",
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 300,
    ) -> Series:
        """The noise scale of one run as it stood at each block's end.

        Args:
            name: Of the run.
            group, geometry: Which noise scale.
            from_step, to_step: Only what ends in between.
            max_points: At most so many, evenly chosen.
        """
        query = {
            "group": group,
            "geometry": geometry,
            "from_step": from_step,
            "to_step": to_step,
            "max_points": max_points,
        }
        return self._get(Series, f"/v1/runs/{quote(name, safe='')}/series", query)

    def recommend(self, run: str, **what_if: Any) -> Recommendation:
        """Advice for a run, from what it reported.

        Args:
            run: Its name.
            what_if: Fields of noisescale.advice.WhatIf; each overrides what the run reported.

        Raises:
            InvalidInputError: A what-if field that there is not, or a value that cannot be.
        """
        supposed = parse(WhatIf, what_if)
        query = supposed.model_dump(mode="json", exclude_none=True)
        return self._get(Recommendation, "/recommend", {"run": run, **query})

    def what_if(self, request: RecommendRequest) -> Recommendation:
        """Advice for a state that is given in full; no run is needed."""
        body = request.model_dump_json(exclude_none=True).encode()
        answer = self._transport.exchange(
            "POST",
            "/recommend",
            body=body,
            headers={"Content-Type": "application/json"},
            retry_lost_connection=True,
        )
        return read(answer, Recommendation, url=f"{self.url}/recommend")

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _get(self, model: type[Model], path: str, query: Mapping[str, object] | None = None) -> Model:
        given = {key: value for key, value in (query or {}).items() if value is not None}
        if given:
            path += "?" + urlencode(
                {
                    key: str(value).lower() if isinstance(value, bool) else value
                    for key, value in given.items()
                }
            )
        answer = self._transport.exchange("GET", path, retry_lost_connection=True)
        return read(answer, model, url=self.url + path.partition("?")[0])


def parse(model: type[Model], values: Mapping[str, object]) -> Model:
    """A model from values that a user gave.

    Raises:
        InvalidInputError: The first value that cannot be, by name.
    """
    try:
        return model.model_validate(values)
    except ValidationError as wrong:
        first = wrong.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "input"
        if first["type"] == "extra_forbidden":
            message = f"there is no {field}; known are {', '.join(sorted(_fields(model)))}"
        elif first["type"] == "missing":
            message = f"{field} is missing"
        elif first["type"] == "value_error":
            message = first["msg"].removeprefix("Value error, ")
        else:
            message = f"{field}: {first['msg']}, got {first['input']!r:.100}"
        raise InvalidInputError(message, field=field) from wrong


def _fields(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)
