"""The picture: made for every kind of run, whatever is not known of it."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from noisescale.advice import Recommendation, RecommendRequest
from noisescale.recommend import recommend
from noisescale.wire import Series, SeriesPoint
from noisescale_client.picture import save_picture

BLUE, ORANGE, GREEN = (0x25, 0x63, 0xEB), (0xD9, 0x77, 0x06), (0x05, 0x96, 0x69)


def points(count: int, *, bounded_from: int = 0, batch: float | None = 32) -> list[SeriesPoint]:
    return [
        SeriesPoint(
            step=10 * index,
            examples=320 * index,
            noise_scale=200.0 + index if index >= bounded_from else None,
            lower=150.0 + index,
            upper=300.0 + index if index >= bounded_from else None,
            trace_covariance=1.0,
            true_grad_sq_norm=0.005,
            global_batch_size=batch,
            learning_rate=0.05,
        )
        for index in range(count)
    ]


def advice(*, lower: float, upper: float | None, learning_rate: float | None = 0.05) -> Recommendation:
    return recommend(
        RecommendRequest.model_validate(
            {
                "global_batch_size": 32,
                "learning_rate": learning_rate,
                "optimizer": "sgd",
                "measured_steps": 1000,
                "noise_scale": {"lower": lower, "upper": upper},
            }
        )
    )


def colours(path: Path) -> set[tuple[int, ...]]:
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    return set(map(tuple, pixels.tolist()))


@pytest.mark.parametrize(
    ("series", "answer", "seen"),
    [
        pytest.param(points(50), advice(lower=150, upper=300), {BLUE, ORANGE, GREEN}, id="raise"),
        pytest.param(points(50), advice(lower=30, upper=40), {BLUE, ORANGE}, id="hold"),
        pytest.param(
            points(50, bounded_from=50),
            advice(lower=150, upper=None, learning_rate=None),
            {ORANGE, GREEN},
            id="never-bounded",
        ),
        pytest.param(points(1), advice(lower=150, upper=300), {ORANGE, GREEN}, id="one-point"),
        pytest.param([], advice(lower=0, upper=None), set(), id="nothing-measured"),
        pytest.param(points(50, batch=None), advice(lower=150, upper=300), {BLUE, GREEN}, id="no-batch"),
    ],
)
def test_every_run_gets_a_picture(
    tmp_path: Path, series: list[SeriesPoint], answer: Recommendation, seen: set[tuple[int, ...]]
) -> None:
    """The PNG has the noise scale, the batch and the advice in their colours, where they are known."""
    path = tmp_path / "picture.png"
    run = Series(run="test", group="total", geometry="euclidean", batch_unit="examples", points=series)
    save_picture(run, answer, path)
    assert imread(path).shape[:2] == (840, 1500)
    assert seen <= colours(path)
