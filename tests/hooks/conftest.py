"""Ranks for the tests of what runs on ranks."""

from collections.abc import Iterator

import pytest

from tests.hooks.ranks import Ranks


def _ranks(world_size: int) -> Iterator[Ranks]:
    ranks = Ranks(world_size)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """2 gloo processes."""
    yield from _ranks(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    """3 gloo processes."""
    yield from _ranks(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """4 gloo processes."""
    yield from _ranks(4)
