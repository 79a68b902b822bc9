"""What attach() is told of a run, besides model and optimizer; the same for every capture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from noisescale.blocks import BatchUnit, Geometry
from noisescale.errors import InvalidInputError
from noisescale.hooks.counting import Count
from noisescale.hooks.destinations import ReportTo
from noisescale.hooks.geometry.sampled import DEFAULT_EVERY, GeometryChoice, chosen_geometries
from noisescale.hooks.groups import Groups
from noisescale.hooks.run_info import Tuned
from noisescale.hooks.sampling import LossReduction


@dataclass(frozen=True, slots=True)
class Options:
    """As of noisescale.attach; checked when built.

    Raises:
        InvalidInputError: One of the few that only this module checks cannot be right.
    """

    report_to: ReportTo = None
    run: str | None = None
    every: int | str = "auto"
    batch_unit: BatchUnit = "examples"
    count: Count | None = None
    token: str | None = None
    tuned: Tuned = None
    max_micro_batch_size: int | None = None
    labels: Mapping[str, str] | None = None
    max_overhead: float = 0.01
    grad_scaler: Any = None
    loss_reduction: LossReduction | None = None
    groups: Groups = None
    geometry: GeometryChoice = "euclidean"
    geometry_every: int = DEFAULT_EVERY

    @property
    def other_geometries(self) -> tuple[Geometry, ...]:
        """Those to be measured beside the Euclidean one."""
        return chosen_geometries(self.geometry)

    def unscale(self) -> Tensor | None:
        """What squares of gradients are multiplied by to undo the loss scale of now; None for nothing.

        A 0-d float64 tensor, cloned, for the scaler changes its scale in place before squares are read.
        """
        scale = getattr(self.grad_scaler, "_scale", None)
        return scale.detach().clone().double().square().reciprocal() if isinstance(scale, Tensor) else None

    def __post_init__(self) -> None:
        _one_of("batch_unit", self.batch_unit, ("examples", "tokens"))
        _one_of("loss_reduction", self.loss_reduction, (None, "mean", "global_mean"))
        chosen_geometries(self.geometry)


def _one_of(name: str, given: object, allowed: tuple[str | None, ...]) -> None:
    if given not in allowed:
        raise InvalidInputError(
            f"{name} is {' or '.join(_quoted(one) for one in allowed)}, got {given!r}", field=name
        )


def _quoted(value: str | None) -> str:
    return "None" if value is None else f'"{value}"'
