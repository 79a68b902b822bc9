"""Carries a job's reports to a server, and asks servers for advice."""

from noisescale_client.client import NoiseScaleClient
from noisescale_client.errors import (
    ClientError,
    DemoError,
    RequestRefusedError,
    ServerUnreachableError,
    UnauthorizedError,
    UnexpectedAnswerError,
    UnknownRunError,
)
from noisescale_client.pusher import HttpPusher

__all__ = [
    "ClientError",
    "DemoError",
    "HttpPusher",
    "NoiseScaleClient",
    "RequestRefusedError",
    "ServerUnreachableError",
    "UnauthorizedError",
    "UnexpectedAnswerError",
    "UnknownRunError",
]
