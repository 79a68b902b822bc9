"""every="auto" keeps the cost of measuring under its share of the step time."""

import pytest

from noisescale.errors import InvalidInputError
from noisescale.hooks.overhead import MAX_EVERY, OverheadMeter


def run(meter: OverheadMeter, *, step_s: float, cost_s: float, steps: int, at: float = 0.0) -> float:
    """So many steps by a made-up clock, measured as often as the meter says; the time at the end."""
    for step in range(steps):
        meter.passed(at)
        measured = step % meter.every == 0
        if measured:
            meter.measured(cost_s)
        at += step_s + (cost_s if measured else 0)
    return at


@pytest.mark.parametrize(("cost_s", "every"), [(0.0005, 1), (0.002, 2), (0.01, 10), (0.05, 50)])
def test_settles_on_the_share(cost_s: float, every: int) -> None:
    """A step of 100 ms and a cost of 2% settle on every 2nd step for a share of 1%, and so on."""
    meter = OverheadMeter("auto", max_overhead=0.01)
    run(meter, step_s=0.1, cost_s=cost_s, steps=3000)
    assert every <= meter.every <= every * 1.25 + 1
    assert meter.share is not None
    assert meter.share <= 0.0101


def test_follows_the_step_time() -> None:
    """Steps that become ten times as long are measured more often."""
    meter = OverheadMeter("auto", max_overhead=0.01)
    at = run(meter, step_s=0.01, cost_s=0.005, steps=5000)
    assert meter.every >= 50
    run(meter, step_s=0.1, cost_s=0.005, steps=20_000, at=at)
    assert meter.every <= 7


def test_a_given_number_stays() -> None:
    """every=3 is 3 whatever it costs; the share is still told."""
    meter = OverheadMeter(3, max_overhead=0.01)
    run(meter, step_s=0.1, cost_s=0.1, steps=300)
    assert meter.every == 3
    assert meter.share == pytest.approx(1 / 3, rel=0.2)


def test_never_gives_up_altogether() -> None:
    """However dear measuring is, one step in 1,000 is measured."""
    meter = OverheadMeter("auto", max_overhead=1e-6)
    run(meter, step_s=0.001, cost_s=1.0, steps=200)
    assert meter.every == MAX_EVERY


@pytest.mark.parametrize("every", [0, -1, True, "sometimes", 0.5])
def test_wrong_every(every: int | str) -> None:
    """Anything but "auto" and whole numbers from 1 is refused."""
    with pytest.raises(InvalidInputError, match="every is"):
        OverheadMeter(every, max_overhead=0.01)
