"""How many examples, or tokens, go into each forward pass.

Counted before the forward by a hook on the model, from the shapes of its inputs alone, so the
device is never waited for.
"""

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisescale.blocks import BatchUnit
from noisescale.errors import BatchCountError

Count = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""From a forward's positional and keyword arguments to its examples (or tokens)."""

_WRITE_INSTEAD = "pass count=lambda args, kwargs: <number of {unit} in this forward> to attach()"


def count_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], *, batch_unit: BatchUnit) -> int:
    """The first tensor's dim 0; in tokens, the elements of the first integer tensor.

    Looks through lists, tuples and mappings, positional arguments first.

    Raises:
        BatchCountError: There is no such tensor.
    """
    for tensor in _tensors((args, kwargs)):
        if batch_unit == "examples" and tensor.dim() > 0:
            return tensor.shape[0]
        if batch_unit == "tokens" and _is_integer(tensor):
            return tensor.numel()
    wanted = "tensor with a batch dimension" if batch_unit == "examples" else "integer tensor (token ids)"
    given = [type(value).__name__ for value in (*args, *kwargs.values())]
    raise BatchCountError(
        f"cannot count the {batch_unit} of a forward pass: no {wanted} among its inputs "
        f"({', '.join(given) or 'none'}); {_WRITE_INSTEAD.format(unit=batch_unit)}"
    )


def count_by(
    count: Count | None, args: tuple[Any, ...], kwargs: dict[str, Any], *, batch_unit: BatchUnit
) -> int:
    """By the user's function where there is one; checked.

    Raises:
        BatchCountError: It did not answer a whole number of 0 or more, or there is nothing to count.
    """
    if count is None:
        return count_inputs(args, kwargs, batch_unit=batch_unit)
    answer = count(args, kwargs)
    if isinstance(answer, Tensor):
        raise BatchCountError(
            "count= returned a tensor, and reading it would make the host wait for the device; return "
            "an int, from shapes: lambda args, kwargs: args[0].shape[0]"
        )
    try:
        number = operator.index(answer)
    except TypeError:
        number = -1
    if number < 0:
        raise BatchCountError(
            f"count= returned {answer!r}; it must return the number of {batch_unit} in this forward, a "
            "whole number of 0 or more"
        )
    return number


@dataclass(frozen=True, slots=True)
class Tally:
    """What one rank put into one synchronised backward pass.

    The sample behind the rank's gradient is all of its micro-batches together.

    Attributes:
        micro_batches: Forward passes since the synchronised backward before; 0 on a rank that
            has run out of data (Join).
        count: Examples (or tokens) in them.
        inverse_count: 1/n of the sample. 1/count for micro-batches of one size; in general the
            mean of M micro-batch gradients has variance tr(Sigma) sum_j (1/n_j) / M^2.
        mean_inverse: sum_j (1/n_j) / M, for which each micro-batch is a sample.
    """

    micro_batches: int
    count: int
    inverse_count: float
    mean_inverse: float


NO_TALLY = Tally(0, 0, inverse_count=0.0, mean_inverse=0.0)
"""Of a rank that has no sample."""


@dataclass(slots=True)
class _Forwards:
    micro_batches: int = 0
    count: int = 0
    sum_of_inverses: float = 0.0

    def add(self, count: int) -> None:
        if count > 0:
            self.micro_batches += 1
            self.count += count
            self.sum_of_inverses += 1.0 / count

    def tally(self) -> Tally:
        mean = self.sum_of_inverses / self.micro_batches if self.micro_batches else 0.0
        inverse = mean / self.micro_batches if self.micro_batches else 0.0
        return Tally(self.micro_batches, self.count, inverse_count=inverse, mean_inverse=mean)


class BatchCounter:
    """Counts forward passes between synchronised backward passes.

    A forward without gradients is no training. One with gradients but in eval mode is mostly an
    evaluation that forgot no_grad(), so such forwards count only where there are no others: a
    model that is fine-tuned in eval mode.
    """

    def __init__(self) -> None:
        self._training = _Forwards()
        self._evaluation = _Forwards()

    def add(self, count: int, *, training: bool) -> None:
        """One forward of `count` examples that may be followed by a backward."""
        (self._training if training else self._evaluation).add(count)

    @property
    def only_evaluates(self) -> bool:
        """Whether there was no forward in training mode since the last take()."""
        return self._training.micro_batches == 0

    def take(self) -> Tally:
        """What there has been since the last take()."""
        chosen = self._training if self._training.micro_batches else self._evaluation
        self._training, self._evaluation = _Forwards(), _Forwards()
        return chosen.tally()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
