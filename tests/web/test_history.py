"""A run's history as the charts read it: the estimator's own values, its changes, its phases."""

import csv
import io
import itertools

import pytest

from noisescale.blocks import Block
from noisescale.estimate import estimate
from noisescale_server.web.charts import RUN_POINTS, charts_of, limits_of
from noisescale_server.web.history import History
from noisescale_server.web.sparkline import HEIGHT, WIDTH, sparkline
from noisescale_server.web.table import COLUMNS, csv_of
from tests.web.seeded import constant, made_blocks, warmup_cosine

WINDOW = 200


@pytest.fixture(scope="module")
def blocks() -> list[Block]:
    """A run whose batch and rate are raised half way."""
    return made_blocks(
        steps=2000,
        noise_scale=lambda done: 300 * (1 + 3 * done),
        batch=lambda done: 64.0 if done < 0.5 else 128.0,
        learning_rate=lambda done: 0.1 if done < 0.5 else 0.2,
    )


def test_every_point_is_the_estimators(blocks: list[Block]) -> None:
    """The one pass over a run gives at each block what noisescale.estimate gives over its window."""
    history = History(blocks, window_steps=WINDOW)
    trailing = history.trailing()
    for index in range(0, len(blocks), 7):
        start = history.starts[index]
        found = estimate(blocks[start : index + 1], window_steps=WINDOW)
        assert found.trace_covariance is not None
        assert found.true_grad_sq_norm is not None
        assert trailing[index].trace_covariance == pytest.approx(found.trace_covariance, rel=1e-9)
        assert trailing[index].true_grad_sq_norm == pytest.approx(found.true_grad_sq_norm, rel=1e-7)
        assert history.estimate_at(index, trailing[index], "total", "euclidean") == found


def test_changes_are_found(blocks: list[Block]) -> None:
    """A batch, a rate and an attempt that took over, at their steps and examples, in step order."""
    found = History(blocks, window_steps=WINDOW).changes([(2, 1500)])
    assert [(change.kind, change.step, change.text) for change in found] == [
        ("batch", 1000, "batch 64 → 128"),
        ("learning_rate", 1000, "learning rate 0.1 → 0.2"),
        ("restart", 1500, "attempt 2 starts"),
    ]
    assert found[0].examples == 1000 * 64
    assert found[2].examples == 1000 * 64 + 500 * 128


def test_a_schedule_is_not_a_row_of_changes() -> None:
    """A warmup that goes up steeply and a cosine are stretches, and mark nothing."""
    history = History(
        made_blocks(
            steps=4000, noise_scale=constant(300), batch=constant(64), learning_rate=warmup_cosine(0.1)
        ),
        window_steps=WINDOW,
    )
    assert history.changes() == []
    phases = [stretch.phase for stretch in history.stretches()]
    assert phases == ["warmup", "lr_decay"]
    ends = [(stretch.first_step, stretch.last_step) for stretch in history.stretches()]
    assert ends[0][0] == 0
    assert ends[-1][1] == 4000
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ends))


def test_a_million_steps_are_few_points() -> None:
    """With the least and the greatest of everything drawn, and of the learning rate its peak."""
    blocks = made_blocks(
        steps=1_000_000,
        block_steps=200,
        noise_scale=lambda done: 500 * (1 + 12 * done),
        batch=constant(256),
        learning_rate=warmup_cosine(0.1),
    )
    history = History(blocks, window_steps=1000)
    points = charts_of(history, run="long", version=1, advice=None).points
    assert len(blocks) == 5000
    assert len(points.step) <= RUN_POINTS
    ratios = [point.ratio for point in history.trailing() if point.ratio is not None]
    drawn = [value for value in points.noise_scale if value is not None]
    assert min(drawn) == pytest.approx(min(ratios), rel=1e-6)
    assert max(drawn) == pytest.approx(max(ratios), rel=1e-6)
    rates = [rate for rate in points.learning_rate if rate is not None]
    assert max(rates) == max(block.learning_rate or 0 for block in blocks)
    assert (points.step[0], points.step[-1]) == (200, 1_000_000)


def test_csv_leaves_nothing_out(blocks: list[Block]) -> None:
    """A row a block, with the estimate as it stood there and its interval."""
    history = History(blocks, window_steps=WINDOW)
    rows = list(csv.DictReader(io.StringIO("".join(csv_of(history, group="total", geometry="euclidean")))))
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["step"]) for row in rows] == [block.last_step for block in blocks]
    last = estimate(blocks[history.starts[-1] :], window_steps=WINDOW)
    assert float(rows[-1]["noise_scale"]) == last.noise_scale
    assert float(rows[-1]["lower"]) == last.lower
    assert float(rows[-1]["upper"]) == last.upper
    assert int(rows[-1]["examples"]) == sum(block.examples for block in blocks)


def test_an_early_open_interval_presses_nothing_flat(blocks: list[Block]) -> None:
    """The axis shows every settled estimate and batch, and not the ends of hardly bounded intervals."""
    points = charts_of(History(blocks, window_steps=WINDOW), run="a", version=1, advice=None).points
    settled = limits_of([points])
    wild = points.model_copy(update={"upper": [1e12, *points.upper[1:]]})
    found = limits_of([wild])
    assert settled is not None
    assert found is not None
    assert found[1] < 1e5
    assert found[0] <= min(size for size in points.global_batch_size if size)


def test_sparkline_has_a_gap_where_nothing_is_known() -> None:
    """Inside its box; where |G|^2 is not positive for a while the line is broken, not drawn through."""
    blocks = made_blocks(
        steps=800, noise_scale=constant(300), batch=constant(64), learning_rate=constant(0.1), cv=0.3
    )
    whole = sparkline(blocks)
    assert whole is not None
    assert len(whole.lines) == 1
    lost = [block.model_copy(update={"sums": (_negative(block),)}) for block in blocks[30:60]]
    broken = sparkline([*blocks[:30], *lost, *blocks[60:]])
    assert broken is not None
    assert len(broken.lines) == 2
    for line in (*broken.lines, broken.batch):
        for point in line.split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= WIDTH
            assert 0 <= y <= HEIGHT


def _negative(block: Block) -> object:
    sums = block.sums[0]
    return sums.model_copy(update={"true_grad_sq_norm": -abs(sums.true_grad_sq_norm)})
