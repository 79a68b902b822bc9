"""An optimizer's family, found by its class and by what it wraps."""

import gc

import pytest
import torch

from noisescale.hooks.optimizers import describe, family_of, learning_rate_of, resolve_optimizer


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2, 2))]


class Lion(torch.optim.SGD):
    """As third-party packages name it."""


class Wrapper:
    """As accelerate and others wrap an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize(
    ("optimizer", "family"),
    [
        (torch.optim.SGD(parameters(), lr=0.1), "sgd"),
        (torch.optim.Adam(parameters()), "adam"),
        (torch.optim.AdamW(parameters()), "adamw"),
        (torch.optim.NAdam(parameters()), "adam"),
        (torch.optim.Adamax(parameters()), "adam"),
        (torch.optim.Muon(parameters(), lr=0.1), "muon"),
        (Lion(parameters(), lr=0.1), "lion"),
        (torch.optim.Rprop(parameters()), "other"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_family(optimizer: torch.optim.Optimizer, family: str) -> None:
    """torch's own and well-known names; wrapped too."""
    assert family_of(optimizer) == family
    assert family_of(Wrapper(optimizer)) == family
    assert resolve_optimizer(torch.nn.Linear(1, 1), Wrapper(optimizer)) is optimizer


def test_described() -> None:
    """Betas, epsilon and weight decay of the first group; tensors are read."""
    optimizer = torch.optim.AdamW(parameters(), lr=torch.tensor(1e-3), betas=(0.8, 0.95), weight_decay=0.1)
    described = describe(optimizer)
    assert described["optimizer_name"] == "AdamW"
    assert (described["beta1"], described["beta2"], described["weight_decay"]) == (0.8, 0.95, 0.1)
    assert learning_rate_of(optimizer) == pytest.approx(1e-3)


def test_found_among_living_objects() -> None:
    """The one optimizer that holds the model's parameters, and no other model's."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    wanted = torch.optim.SGD(model.parameters(), lr=0.1)
    beside = torch.optim.SGD(other.parameters(), lr=0.1)
    assert resolve_optimizer(model, None) is wanted
    assert resolve_optimizer(other, None) is beside
    del wanted
    gc.collect()
