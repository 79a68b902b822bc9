"""What a monitor tells of its run besides the gradients."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from noisescale.errors import InvalidInputError
from noisescale.wire import RunInfo, TunedBase

Tuned = TunedBase | Mapping[str, float] | None


def run_info(
    model: nn.Module,
    *,
    optimizer_fields: Mapping[str, Any],
    dp_world_size: int,
    loss_reduction: str | None,
    samples: str,
    tuned: Tuned,
    max_micro_batch_size: int | None,
    labels: Mapping[str, str] | None,
) -> RunInfo:
    """Checked.

    Args:
        optimizer_fields: As of noisescale.hooks.optimizers.describe.
        tuned: TunedBase(global_batch_size=..., learning_rate=...), or a mapping of the two.

    Raises:
        InvalidInputError: tuned, max_micro_batch_size or labels cannot be right; says which.
    """
    try:
        return RunInfo.model_validate(
            {
                **optimizer_fields,
                "dp_world_size": dp_world_size,
                "loss_reduction": loss_reduction,
                "samples": samples,
                "batch_norm": keeps_statistics_per_rank(model),
                "tuned": tuned,
                "max_micro_batch_size": max_micro_batch_size,
                "labels": dict(labels or {}),
                "versions": {
                    "noisescale": version("noisescale"),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
            }
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidInputError(
            f"attach({first['loc'][0]}=...): {field}: {first['msg']}", field=field
        ) from error


def keeps_statistics_per_rank(model: nn.Module) -> bool:
    """Whether there are BatchNorm layers that are not SyncBatchNorm."""
    return any(
        isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        for module in model.modules()
    )
