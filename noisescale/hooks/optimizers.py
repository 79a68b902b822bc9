"""What can be read off an optimizer: its family, its settings, its learning rate."""

import gc
import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from noisescale.errors import OptimizerNotFoundError
from noisescale.wire import OptimizerFamily

_FAMILIES: tuple[tuple[str, OptimizerFamily], ...] = (
    # The more specific name first: "adamw" also contains "adam".
    ("lamb", "lamb"),
    ("lars", "lars"),
    ("larc", "lars"),
    ("lion", "lion"),
    ("muon", "muon"),
    ("signum", "sign"),
    ("signsgd", "sign"),
    ("adamw", "adamw"),
    ("nadam", "adam"),
    ("radam", "adam"),
    ("adamax", "adam"),
    ("adam", "adam"),
    ("sgd", "sgd"),
)

_INNER = ("optimizer", "optim", "base_optimizer")
"""Attributes under which wrappers keep the optimizer that they wrap."""


def resolve_optimizer(model: nn.Module, optimizer: object | None) -> Optimizer:
    """The torch optimizer that trains `model`.

    Args:
        model: The model being attached to.
        optimizer: As the user gave it, perhaps wrapped. None looks for the one living optimizer
            that holds a parameter of the model.

    Raises:
        OptimizerNotFoundError: There is none, there are several, or the given one is no torch
            optimizer and wraps none.
    """
    if optimizer is not None:
        for layer in _layers(optimizer):
            if isinstance(layer, Optimizer):
                return layer
        raise OptimizerNotFoundError(
            f"optimizer= is a {type(optimizer).__name__}, which is no torch.optim.Optimizer and wraps none; "
            "pass the optimizer whose step() trains the model"
        )
    own = {id(parameter) for parameter in model.parameters()}
    found = [
        candidate
        for candidate in gc.get_objects()
        if issubclass(type(candidate), Optimizer) and any(id(p) in own for p in parameters_of(candidate))
    ]
    if len(found) == 1:
        return found[0]  # type: ignore[no-any-return]  # gc answers Any
    if not found:
        raise OptimizerNotFoundError(
            "no optimizer holds a parameter of this model; create it first and pass it: "
            "attach(model, optimizer)"
        )
    names = ", ".join(sorted(type(candidate).__name__ for candidate in found))
    raise OptimizerNotFoundError(
        f"{len(found)} optimizers hold parameters of this model ({names}); pass the one whose learning "
        "rate is meant: attach(model, optimizer)"
    )


def parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    """All parameters of an optimizer that is set up; none of one that is not."""
    for group in getattr(optimizer, "param_groups", ()):
        yield from group["params"]


def family_of(optimizer: object) -> OptimizerFamily:
    """By the class's name, its bases' and those of what it wraps; "other" where none is known."""
    for layer in _layers(optimizer):
        for cls in type(layer).__mro__:
            name = cls.__name__.lower()
            for part, family in _FAMILIES:
                if part in name:
                    return "adamw" if family == "adam" and _decouples(layer) else family
    return "other"


def describe(optimizer: Optimizer, *, given: object | None = None) -> dict[str, Any]:
    """The fields of noisescale.wire.RunInfo that an optimizer tells; what cannot be right is left out.

    Args:
        optimizer: Whose parameter groups to read; the first group counts.
        given: The wrapper around it, if there is one, which may name the family.
    """
    outer = given if given is not None else optimizer
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    betas = group.get("betas") or (None, None)
    fields = {
        "momentum": _share(group.get("momentum")),
        "beta1": _share(betas[0]),
        "beta2": _share(betas[1]) if len(betas) > 1 else None,
        "epsilon": _not_negative(group.get("eps")),
        "weight_decay": _not_negative(group.get("weight_decay")),
    }
    known = {name: value for name, value in fields.items() if value is not None}
    return {"optimizer": family_of(outer), "optimizer_name": type(outer).__name__[:128], **known}


def learning_rate_of(optimizer: Optimizer) -> float | Tensor | None:
    """Of the first parameter group; a tensor where the job keeps it as one on a device.

    A tensor is copied, for the scheduler writes into it.
    """
    rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    if isinstance(rate, Tensor):
        return rate.detach().clone() if rate.device.type != "cpu" else float(rate.reshape(-1).tolist()[0])
    return float(rate) if rate is not None else None


def _layers(optimizer: object) -> Iterator[object]:
    """An optimizer, what it wraps, what that wraps."""
    seen: set[int] = set()
    layer: object | None = optimizer
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        layer = _first(getattr(layer, name, None) for name in _INNER)


def _first(candidates: Iterable[object | None]) -> object | None:
    return next((c for c in candidates if c is not None and hasattr(c, "param_groups")), None)


def _decouples(optimizer: object) -> bool:
    groups = getattr(optimizer, "param_groups", None) or [{}]
    return bool(groups[0].get("decoupled_weight_decay", False))


def _not_negative(value: object) -> float | None:
    number = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(number, int | float) and math.isfinite(number) and number >= 0:
        return float(number)
    return None


def _share(value: object) -> float | None:
    number = _not_negative(value)
    return number if number is not None and number < 1 else None
