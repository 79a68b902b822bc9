"""Layer groups: parts of the model, each with a noise scale of its own beside the total.

Parameters are told apart by identity: DDP's buckets are made anew after the first step, and their
order is no one's name.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from noisescale.blocks import TOTAL
from noisescale.errors import InvalidInputError
from noisescale.hooks.norms import square_norm

Groups = str | Sequence[str] | Mapping[str, str] | Callable[[str, nn.Parameter], str | None] | None
"""What attach() takes as groups=."""

MAX_GROUPS = 64
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_BY_OPTIMIZER = "param_groups"


class LayerGroups:
    """Which parameter belongs to which group.

    Attributes:
        names: "total" first, then the others in their order.
    """

    def __init__(self, names: Sequence[str] = (), members: Mapping[int, int] | None = None) -> None:
        self.names = (TOTAL, *names)
        self._members = dict(members or {})

    @property
    def only_total(self) -> bool:
        """Whether there are no groups, so that a buffer need not be taken apart."""
        return len(self.names) == 1

    def named_like(self, own: Sequence[Tensor], others: Sequence[Tensor]) -> "LayerGroups":
        """The same groups for other parameters, each in the group of the one in its place."""
        if own is others:
            return self
        pairs = zip(own, others, strict=True)
        members = {id(other): self._members[id(one)] for one, other in pairs if id(one) in self._members}
        return LayerGroups(self.names[1:], members)

    def sums(self, squares: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        """Square norms by group: a float64 vector in the order of `names`.

        Args:
            squares: A 0-d float64 tensor per parameter.
            parameters: Theirs.
        """
        if not squares:
            return torch.zeros(len(self.names), dtype=torch.float64)
        stacked = torch.stack(list(squares))
        total = stacked.sum().reshape(1)
        if self.only_total:
            return total
        chosen = [i for i, parameter in enumerate(parameters) if id(parameter) in self._members]
        groups = torch.zeros(len(self.names) - 1, dtype=torch.float64, device=stacked.device)
        if chosen:
            # Copied without waiting: indexing by numbers that lie on the host would wait for the device.
            where = torch.tensor([self._members[id(parameters[i])] - 1 for i in chosen])
            picked = stacked.index_select(0, torch.tensor(chosen).to(stacked.device, non_blocking=True))
            groups.index_add_(0, where.to(stacked.device, non_blocking=True), picked)
        return torch.cat([total, groups])

    def of_buffer(self, buffer: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """The same of a flat buffer that holds the parameters' gradients one after another."""
        if self.only_total:
            return square_norm(buffer).reshape(1)
        flat, sizes = buffer.detach().reshape(-1), [parameter.numel() for parameter in parameters]
        pieces = torch.split(flat, sizes)
        return self.sums([square_norm(piece) for piece in pieces], parameters)


def resolve_groups(groups: Groups, *, model: nn.Module, optimizer: Optimizer) -> LayerGroups:
    """Of attach()'s groups=.

    Args:
        groups: None for none; "param_groups" for the optimizer's; patterns of parameter names, as
            "*attention*", the first that fits counts, in a list, or in a mapping from the group's name; or a
            function of a parameter's name and the parameter to its group's name, or None.

    Raises:
        InvalidInputError: There are too many, one has no name that can be one, or none has a parameter.
    """
    if groups is None:
        return LayerGroups()
    named = [
        (name.removeprefix("module."), parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    group_of = _chooser(groups, optimizer)
    names: dict[str, int] = {}
    members: dict[int, int] = {}
    for name, parameter in named:
        group = group_of(name, parameter)
        if group is None:
            continue
        if group == TOTAL or not isinstance(group, str) or not _NAME.fullmatch(group):
            raise InvalidInputError(
                f"groups= gave {name} the group {group!r}; a group's name is 1 to 128 letters, digits, dots, "
                'underscores and hyphens, and not "total"',
                field="groups",
            )
        members[id(parameter)] = names.setdefault(group, len(names) + 1)
        if len(names) > MAX_GROUPS:
            raise InvalidInputError(
                f"groups= makes more than {MAX_GROUPS} groups; group more coarsely", field="groups"
            )
    if not names:
        raise InvalidInputError(
            f"groups={groups!r} fits none of the model's {len(named)} parameters; they are named like "
            f"{', '.join(name for name, _ in named[:3])}",
            field="groups",
        )
    return LayerGroups(tuple(names), members)


def _chooser(groups: Groups, optimizer: Optimizer) -> Callable[[str, nn.Parameter], str | None]:
    if callable(groups):
        return groups
    if groups == _BY_OPTIMIZER:
        owner = {
            id(parameter): str(group.get("name", f"group-{index}"))
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        return lambda name, parameter: owner.get(id(parameter))
    if isinstance(groups, Mapping):
        patterns = dict(groups)
    elif (
        isinstance(groups, str)
        or not isinstance(groups, Sequence)
        or not all(isinstance(pattern, str) for pattern in groups)
    ):
        raise InvalidInputError(
            f'groups is "param_groups", patterns of parameter names ["*attention*", "*mlp*"], a mapping '
            f"from group to pattern, or a function of name and parameter; got {groups!r}",
            field="groups",
        )
    else:
        patterns = {_as_name(pattern): pattern for pattern in groups}

    def by_pattern(name: str, parameter: nn.Parameter) -> str | None:
        return next((group for group, one in patterns.items() if fnmatch.fnmatchcase(name, one)), None)

    return by_pattern


def _as_name(pattern: str) -> str:
    """A pattern without what a name may not have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "", pattern).strip(".-_")[:128] or "group"
