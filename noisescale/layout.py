"""Realising a global batch as micro-batch x ranks x accumulation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from noisescale.errors import ContradictionError

_MOST_TRIED = 4096
"""Ways to split a batch that are tried; the first is short of it by less than one part in the largest
micro-batch, so that of more there is nothing to gain, and numbers that are no batch cost nothing."""


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A layout as reported, completed where one number follows from the others.

    Attributes:
        micro_batch_size: May be fractional where per-step sizes vary (tokens).
    """

    micro_batch_size: float
    dp_world_size: int
    accumulation_steps: int
    assumed: tuple[str, ...]


def complete_layout(
    *,
    global_batch_size: float,
    micro_batch_size: float | None,
    dp_world_size: int | None,
    accumulation_steps: int | None,
    tolerance: float = 0.0,
) -> KnownLayout | None:
    """The whole layout from what is known of it; None where too little is.

    Args:
        tolerance: Relative difference between the product and the batch that is no
            contradiction: 0 for fixed sizes, more where sizes vary from step to step.

    Raises:
        ContradictionError: All three are given and their product is not global_batch_size, or
            two are given and do not divide it.
    """
    assumed: list[str] = []
    if accumulation_steps is None and micro_batch_size is not None and dp_world_size is not None:
        exact = global_batch_size / (micro_batch_size * dp_world_size)
        if tolerance > 0 or exact == round(exact):
            accumulation_steps = max(1, round(exact))
    if dp_world_size is None and micro_batch_size is not None and accumulation_steps is not None:
        dp_world_size = max(1, round(global_batch_size / (micro_batch_size * accumulation_steps)))
    if dp_world_size is None:
        return None
    if accumulation_steps is None:
        if micro_batch_size is not None:
            _contradict(global_batch_size, micro_batch_size, dp_world_size, None)
        accumulation_steps = 1
        assumed.append("accumulation_steps = 1 (not reported)")
    if micro_batch_size is None:
        micro_batch_size = global_batch_size / (dp_world_size * accumulation_steps)
        assumed.append(f"micro_batch_size = {micro_batch_size:g} (from the global batch)")
    product = micro_batch_size * dp_world_size * accumulation_steps
    if not math.isclose(product, global_batch_size, rel_tol=max(tolerance, 1e-9)):
        _contradict(global_batch_size, micro_batch_size, dp_world_size, accumulation_steps)
    return KnownLayout(
        micro_batch_size=micro_batch_size,
        dp_world_size=dp_world_size,
        accumulation_steps=accumulation_steps,
        assumed=tuple(assumed),
    )


def _contradict(global_batch: float, micro: float, ranks: int, accumulation: int | None) -> None:
    factors = f"micro_batch_size {micro:g} x dp_world_size {ranks}"
    product = micro * ranks
    if accumulation is not None:
        factors += f" x accumulation_steps {accumulation}"
        product *= accumulation
    raise ContradictionError(
        f"global_batch_size {global_batch:g} and the layout disagree: {factors} = {product:g}; "
        f"correct one of them, or leave one out and it is worked out from the others",
        fields=("global_batch_size", "micro_batch_size"),
    )


@dataclass(frozen=True, slots=True)
class Realised:
    """A batch that can be run: micro_batch_size x dp_world_size x accumulation_steps."""

    micro_batch_size: int
    dp_world_size: int
    accumulation_steps: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.dp_world_size * self.accumulation_steps


def realise(
    *, target: float, dp_world_size: int, max_micro_batch_size: int, fixed_micro_batch_size: int | None = None
) -> Realised | None:
    """The largest b x R x a that is at most `target`, with the fewest accumulation steps.

    Args:
        max_micro_batch_size: b is at most this.
        fixed_micro_batch_size: Keep b at this (nets with BatchNorm).

    Returns:
        None where not even one example per rank fits under the target.
    """
    per_rank = math.floor(target / dp_world_size + 1e-9)
    if min(per_rank, max_micro_batch_size if fixed_micro_batch_size is None else fixed_micro_batch_size) < 1:
        return None
    if fixed_micro_batch_size is not None:
        accumulation = per_rank // fixed_micro_batch_size
        if accumulation < 1:
            return None
        return Realised(fixed_micro_batch_size, dp_world_size, accumulation)
    best: Realised | None = None
    for micro, accumulation in islice(_splits(per_rank, max_micro_batch_size), _MOST_TRIED):
        found = Realised(micro, dp_world_size, accumulation)
        if best is None or found.global_batch_size > best.global_batch_size:
            best = found
        if micro * accumulation == per_rank:
            break
    return best


def _splits(per_rank: int, most: int) -> Iterator[tuple[int, int]]:
    """Micro-batch and accumulation whose product is at most `per_rank`, the fewest accumulation steps first.

    By whichever of the two there are fewer of: either way the largest product is among them.
    """
    largest = min(most, per_rank)
    fewest = -(-per_rank // largest)
    if largest <= per_rank - fewest:
        yield from ((micro, per_rank // micro) for micro in range(largest, 0, -1))
    else:
        yield from ((min(most, per_rank // steps), steps) for steps in range(fewest, per_rank + 1))
