"""Every error the client raises on purpose.

    NoiseScaleError
    └── ClientError
        ├── ServerUnreachableError       no answer: down, refused, too slow
        ├── UnexpectedAnswerError        an answer that is not a noisescale server's
        ├── RequestRefusedError          an answer of 4xx or 5xx
        │   ├── UnauthorizedError        401 or 403: the token is missing or wrong
        │   └── UnknownRunError          404: no such run; knows the nearest ones
        └── DemoError                    the demo cannot go on

The pusher raises none of them in a training job: it logs the first and counts what was dropped.
"""

from collections.abc import Sequence

from noisescale.errors import NoiseScaleError


class ClientError(NoiseScaleError):
    """Base of the client's errors."""


class ServerUnreachableError(ClientError):
    """The server gave no answer.

    Attributes:
        url: Of the server.
        cause: What happened, in a few words.
    """

    def __init__(self, *, url: str, cause: str) -> None:
        super().__init__(
            f"no answer from {url}: {cause}; start a server there with `noisescale-server serve`, "
            f"or name another with --url or NOISESCALE_URL"
        )
        self.url = url
        self.cause = cause


class UnexpectedAnswerError(ClientError):
    """Something answered that does not speak noisescale, or a version that does not fit.

    Attributes:
        url: Of the request.
        status: HTTP status of the answer.
    """

    def __init__(self, *, url: str, status: int, problem: str) -> None:
        super().__init__(
            f"{url} answered {status}, but not as a noisescale server of this version does: {problem}"
        )
        self.url = url
        self.status = status


class RequestRefusedError(ClientError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        detail: The server's own message.
        fields: The request's fields at fault, where the server names them.
    """

    def __init__(self, *, status: int, detail: str, fields: Sequence[str] = ()) -> None:
        super().__init__(f"the server refused the request ({status}): {detail}")
        self.status = status
        self.detail = detail
        self.fields = tuple(fields)


class UnauthorizedError(RequestRefusedError):
    """The server wants a token, or another one."""

    def __init__(self, *, status: int, detail: str) -> None:
        super().__init__(status=status, detail=f"{detail}; give the token with --token or NOISESCALE_TOKEN")


class UnknownRunError(RequestRefusedError):
    """The server knows no run of that name.

    Attributes:
        nearest: The known runs with the most similar names.
    """

    def __init__(self, *, detail: str, nearest: Sequence[str]) -> None:
        super().__init__(status=404, detail=detail)
        self.nearest = tuple(nearest)


class DemoError(ClientError):
    """The demo cannot go on: a missing extra, a port, a process that failed."""
