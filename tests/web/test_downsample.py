"""Fewer points for a chart, with every peak and trough."""

import random

from hypothesis import given
from hypothesis import strategies as st

from noisescale_server.web.downsample import keep_extremes


@given(
    rows=st.integers(min_value=0, max_value=2000),
    columns_count=st.integers(min_value=1, max_value=4),
    max_points=st.integers(min_value=12, max_value=80),
    seed=st.integers(min_value=0, max_value=2**32),
)
def test_ends_minima_and_maxima_are_kept(rows: int, columns_count: int, max_points: int, seed: int) -> None:
    """Of every column, with values missing here and there; in order, each once, no more than asked for."""
    rng = random.Random(seed)
    columns = [
        [rng.choice((None, rng.gauss(0, 1), rng.randrange(5))) for _ in range(rows)]
        for _ in range(columns_count)
    ]
    kept = keep_extremes(columns, max_points=max_points)
    assert kept == sorted(set(kept))
    assert len(kept) <= max_points
    count = len(columns[0])
    if count:
        assert kept[0] == 0
        assert kept[-1] == count - 1
    for column in columns:
        known = [value for value in column if value is not None]
        drawn = [column[index] for index in kept if column[index] is not None]
        assert (min(drawn, default=None), max(drawn, default=None)) == (
            min(known, default=None),
            max(known, default=None),
        )


def test_a_single_spike_is_kept() -> None:
    """One value of a million that evenly chosen points would miss, in a column beside the first."""
    flat, spiked = [1.0] * 1_000_000, [1.0] * 1_000_000
    spiked[765_432] = 9.0
    assert 765_432 in keep_extremes([flat, spiked], max_points=700)


def test_jumps_are_kept_besides() -> None:
    """Indices that have to be drawn are, whatever their values."""
    assert {417, 418} <= set(keep_extremes([[0.0] * 1000], max_points=20, always=(417, 418)))
