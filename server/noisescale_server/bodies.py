"""Request bodies, read up to a limit, gzip undone, and parsed."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from noisescale.wire import ErrorBody
from noisescale_server.api_errors import ApiError

_GZIP_WINDOW = 16 + zlib.MAX_WBITS

_DISCARDED_BYTES = 64 * 2**20
_DISCARDED_S = 10.0
"""How much of a body that is refused is still read, and thrown away: a sender that has not sent it
all would otherwise see a broken connection and no answer."""

BAD_BODY: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The body is not JSON or not gzip",
        408: "The body did not come in in time",
        413: "The body is too large, before or after decompression",
        415: "The body's encoding is not gzip",
        422: "A value that cannot be; nothing is stored",
    }.items()
}
"""What an endpoint that reads a body may answer, for the OpenAPI document."""

_Model = TypeVar("_Model", bound=BaseModel)


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, as it was before compression.

    Args:
        timeout_s: Seconds that it may take to come in.

    Raises:
        ApiError: 413 over `max_bytes`, before or after decompression; 415 an encoding that is not
            gzip; 400 gzip that is broken; 408 it did not come in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(request, max_bytes=max_bytes)
    except TimeoutError:
        raise ApiError(
            408,
            "request_timeout",
            f"the body did not come in within {timeout_s:g} seconds; nothing was stored, send it again",
            headers={"Connection": "close"},
        ) from None


async def _read_body(request: Request, *, max_bytes: int) -> bytes:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise ApiError(
            415,
            "unsupported_encoding",
            "Content-Encoding must be gzip, or left out",
            fields=["Content-Encoding"],
        )
    declared = request.headers.get("content-length", "")
    unpack = zlib.decompressobj(_GZIP_WINDOW) if encoding == "gzip" else None
    body = bytearray()
    received = 0
    stream = request.stream()
    try:
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        async for chunk in stream:
            received += len(chunk)
            if received > max_bytes:
                raise _too_large(max_bytes)
            # One byte more than may be is enough to know; the rest is never unpacked.
            body += unpack.decompress(chunk, max_bytes + 1 - len(body)) if unpack else chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    except zlib.error:
        await _discard(stream)
        raise _broken() from None
    except ApiError:
        await _discard(stream)
        raise
    if unpack is not None and not unpack.eof:
        raise _broken()
    return bytes(body)


def parse_body(model: type[_Model], body: bytes) -> _Model:
    """What a body of JSON holds.

    Raises:
        ApiError: 400: it is not JSON.
        ValidationError: It holds a value that cannot be.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_context=False, include_input=False):
            if problem["type"] == "json_invalid":
                raise ApiError(400, "not_json", f"the body is not JSON: {problem['msg']}"[:300]) from None
        raise


async def _discard(stream: AsyncIterator[bytes]) -> None:
    discarded = 0
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_DISCARDED_S):
            async for chunk in stream:
                discarded += len(chunk)
                if discarded > _DISCARDED_BYTES:
                    return


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        "body_too_large",
        f"the body may have at most {max_bytes} bytes, also after decompression; send fewer blocks at a time",
    )


def _broken() -> ApiError:
    return ApiError(400, "broken_gzip", "Content-Encoding says gzip, but the body is not a whole gzip stream")
