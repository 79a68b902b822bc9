"""What commands do with the database that the settings name."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from noisescale_server.database import Database
from noisescale_server.errors import StartError
from noisescale_server.settings import Settings, load_settings

_T = TypeVar("_T")


def on_database(work: Callable[[Database, Settings], Awaitable[_T]], *, prepare: bool = True) -> _T:
    """Open the database, do something with it, and close it.

    Args:
        prepare: Only where its tables are this version's; SQLite's are brought there.

    Raises:
        StartError: It cannot be reached, or not be worked with.
    """
    settings = load_settings()

    async def run() -> _T:
        database = Database(settings)
        try:
            if prepare:
                await database.prepare()
            return await work(database, settings)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except (SQLAlchemyError, OSError) as error:
        reason = getattr(error, "orig", None) or error
        raise StartError(
            f"the database cannot be reached or changed: {type(reason).__name__}: {reason}"
        ) from error
