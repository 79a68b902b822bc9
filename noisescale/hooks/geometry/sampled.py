"""Other geometries, measured on some of the measured steps: what is gathered, reduced and finished.

Extra cost on such a step, for P parameters of which matrices are m x n:

    adam       memory P (float32, the inverse roots); communication 1 number
    sign       memory 2 P on rank 0, else P; communication P float32
    spectral   as sign for the matrices, and m x m in float64 for each
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from noisescale.blocks import Geometry
from noisescale.errors import InvalidInputError
from noisescale.hooks.geometry import sign, spectral
from noisescale.hooks.geometry.adam import preconditioners, weighted_square
from noisescale.hooks.geometry.halves import Halves, Norms, half_terms, paired_moments, working_dtype
from noisescale.hooks.geometry.moments import DeviceMoments
from noisescale.hooks.reduction import sum_over_ranks
from noisescale.hooks.sampling import Sampling

GeometryChoice = str | Sequence[str]
"""What attach() takes as geometry=: one name or several; "euclidean" is always there."""

NAMES: tuple[Geometry, ...] = ("adam", "sign", "spectral")
DEFAULT_EVERY = 10


@dataclass(slots=True)
class Memory:
    """What a geometry's step leaves to the next one, on rank 0."""

    norms: Norms | None = None
    covariances: spectral.SpectralMemory | None = None


def chosen_geometries(geometry: GeometryChoice) -> tuple[Geometry, ...]:
    """The names beside "euclidean", in a fixed order.

    Raises:
        InvalidInputError: One is none.
    """
    given = (geometry,) if isinstance(geometry, str) else tuple(geometry)
    for name in given:
        if name not in ("euclidean", *NAMES):
            others = [one for one in get_args(Geometry) if one != "norm_layers"]
            raise InvalidInputError(
                f"geometry is one or several of {', '.join(others)}, got {name!r}", field="geometry"
            )
    return tuple(name for name in NAMES if name in given)


class SampledGeometries:
    """Which geometries a capture measures, and on which of its measured steps.

    Args:
        geometries: As of chosen_geometries; at least one.
        every: Of the measured steps, every so many.
        parameters: Those that are trained, in the order in which samples name them.
        optimizer: Whose second moments weigh, and whose matrices are those of Muon.

    Raises:
        InvalidInputError: every is no positive number, or there is nothing to measure.
    """

    def __init__(
        self,
        geometries: Sequence[Geometry],
        *,
        every: int,
        parameters: Sequence[Tensor],
        optimizer: Optimizer,
        sampling: Sampling,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidInputError(
                f"geometry_every is a number of measured steps of at least 1, got {every!r}",
                field="geometry_every",
            )
        self.geometries = tuple(geometries)
        self.every = every
        self.parameters = list(parameters)
        self.optimizer = optimizer
        self.sampling = sampling
        self.memory = Memory()
        matrices = _matrices(self.parameters, optimizer) if "spectral" in self.geometries else []
        self.matrices = dict.fromkeys(matrices)
        if "spectral" in self.geometries and not self.matrices:
            raise InvalidInputError(
                'geometry="spectral" is of parameters with two dimensions or more; the optimizer has none',
                field="geometry",
            )
        every_one = "sign" in self.geometries
        self.signed = dict.fromkeys(range(len(self.parameters)) if every_one else self.matrices)
        self.dtype = max((working_dtype(p) for p in self.parameters), key=lambda dtype: dtype.itemsize)

    @property
    def local_numbers(self) -> int:
        """Numbers that each step adds to the packet."""
        return int("adam" in self.geometries)

    def begin(self, measured: int) -> "GeometryStep | None":
        """The step's gathering, where this measured step is one of those; alike on every rank.

        Args:
            measured: Measured steps before it.
        """
        return GeometryStep(self) if measured % self.every == 0 else None


@dataclass(slots=True)
class GeometryStep:
    """One step's samples, as they come in.

    Call weigh() first; add() for each parameter of each sample and end_sample() for each sample; mean() on
    rank 0 for each parameter's averaged gradient; then ready(), or ready_nothing() where that or anything
    before it went wrong; reduce(), and finish() when all of it is done.
    """

    setup: SampledGeometries
    weighing: list[Tensor | None] = field(init=False)
    local: Tensor | None = None
    wholes: dict[int, Tensor] = field(default_factory=dict)
    signed: dict[int, Tensor] = field(default_factory=dict)
    products: dict[int, Tensor] = field(default_factory=dict)
    means: dict[int, Tensor] = field(default_factory=dict)
    terms: Tensor | None = None
    divisor: int = 1
    works: list[Any] = field(default_factory=list)
    _signed_sum: Tensor | None = None
    _small: Tensor | None = None

    def __post_init__(self) -> None:
        self.weighing = [None] * len(self.setup.parameters)

    def weigh(self) -> None:
        """Take the weights of gradients from the optimizer's state, before it steps."""
        if "adam" in self.setup.geometries:
            self.weighing = preconditioners(self.setup.optimizer, self.setup.parameters)

    def add(self, index: int, gradient: Tensor, *, half: int, factor: float) -> None:
        """One parameter's gradient in one sample, as backward gives it, in the parameter's shape.

        Args:
            half: 1 or -1, as of half_sign.
            factor: Of Sampling.micro_batch_factor.
        """
        setup = self.setup
        if self.weighing[index] is not None:
            square = weighted_square([gradient], [self.weighing[index]]) * factor
            self.local = square if self.local is None else self.local + square
        if index in setup.signed:
            wide = gradient.to(working_dtype(gradient)) * half
            if index in self.signed:
                self.signed[index].add_(wide)
            else:
                self.signed[index] = wide
        if index in setup.matrices:
            before = [self.products[index]] if index in self.products else None
            (self.products[index],) = spectral.add_products([gradient], weight=factor, into=before)

    def end_sample(self, *, half: int, raw_weight: float, count: float) -> None:
        """One sample is whole.

        Args:
            raw_weight: Its weight, up to a factor common to all samples of all ranks.
            count: Examples (or tokens) behind it.
        """
        device = self._device
        terms = torch.cat(
            [
                half_terms(half=half, weight=raw_weight, count=count, device=device),
                torch.tensor([raw_weight / count], dtype=torch.float64).to(device, non_blocking=True),
            ]
        )
        self.terms = terms if self.terms is None else self.terms + terms

    def mean(self, index: int, gradient: Tensor) -> None:
        """One parameter's averaged gradient, in its shape; copied, for the optimizer may change it."""
        if self.weighing[index] is not None:
            # By parameter, for buckets are reduced on several threads.
            self.wholes[index] = weighted_square([gradient], [self.weighing[index]])
        if index in self.setup.signed:
            self.means[index] = gradient.detach().to(working_dtype(gradient), copy=True)

    def local_numbers(self) -> Tensor:
        """What goes into the packet: g'Pg, summed over this rank's samples."""
        device = self._device
        if not self.setup.local_numbers:
            return torch.zeros(0, dtype=torch.float64, device=device)
        if self.local is None:
            return torch.zeros(1, dtype=torch.float64, device=device)
        return self.local.reshape(1)

    def ready(self, *, rank_factor: float, divisor: int) -> None:
        """Put together what is larger than a packet.

        Args:
            rank_factor: Of Sampling.rank_factor.
            divisor: What the sum of gradients over ranks is divided by.
        """
        setup = self.setup
        self.divisor = divisor
        if not setup.signed:
            return
        parts = [
            self.signed[i] if i in self.signed else torch.zeros_like(setup.parameters[i])
            for i in setup.signed
        ]
        self._signed_sum = torch.cat([part.reshape(-1).to(setup.dtype) for part in parts]).div_(divisor)
        small = [self.terms if self.terms is not None else torch.zeros(5, dtype=torch.float64)]
        for i in setup.matrices:
            rows = min(_matrix_shape(setup.parameters[i]))
            product = self.products.get(i)
            if product is None:
                product = torch.zeros(rows, rows, dtype=torch.float64)
            small.append(product.reshape(-1) * rank_factor)
        self._small = torch.cat([piece.to(self._device, non_blocking=True) for piece in small])

    def ready_nothing(self) -> None:
        """The same without anything in it, where it could not be had."""
        setup, device = self.setup, self._device
        self._let_go()
        if setup.signed:
            signed = sum(setup.parameters[i].numel() for i in setup.signed)
            small = 5 + sum(min(_matrix_shape(setup.parameters[i])) ** 2 for i in setup.matrices)
            self._signed_sum = torch.zeros(signed, dtype=setup.dtype, device=device)
            self._small = torch.zeros(small, dtype=torch.float64, device=device)

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Start to sum over ranks what is ready; every rank calls it, whatever it has."""
        if self._signed_sum is None or self._small is None:
            return
        self.works = [sum_over_ranks(self._signed_sum, group), sum_over_ranks(self._small, group)]

    def is_ready(self) -> bool:
        """Whether all of it has been summed."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Until it has been summed; on an accelerator, the stream's waiting."""
        for work in self.works:
            work.wait()

    def finish(self, *, unscale: Tensor | None) -> Tensor:
        """On rank 0: two numbers a geometry, float64, in the order of NAMES; NaN where there are none yet.

        For "adam" they are Q, the weighted square of the averaged gradient, and 0; for the others a step's
        trace_covariance and true_grad_sq_norm.

        Args:
            unscale: Factor of squares that undoes a loss scale.
        """
        nan = torch.full((2,), math.nan, dtype=torch.float64, device=self._device)
        found: list[Tensor] = []
        scale = torch.ones((), dtype=torch.float64, device=self._device) if unscale is None else unscale
        if "adam" in self.setup.geometries:
            if self.wholes:
                whole = torch.stack([self.wholes[i] for i in sorted(self.wholes)]).sum()
                found.append(torch.stack([whole * scale, torch.zeros_like(whole)]))
            else:
                found.append(nan)
        if self.setup.signed:
            halves, spread = self._halves()
            signed = self._split_signed()
            root = scale.sqrt()
            if "sign" in self.setup.geometries:
                found.append(self._finish_sign(signed, halves, root, nan))
            if "spectral" in self.setup.geometries:
                found.append(self._finish_spectral(signed, halves, spread, root, nan))
        self._let_go()
        return torch.cat(found)

    @property
    def _device(self) -> torch.device:
        return self.setup.parameters[0].device

    def _halves(self) -> tuple[Halves, Tensor]:
        """The halves and the spread, their weights made to sum to 1."""
        if self._small is None:
            raise RuntimeError("a geometry's step was finished before it was reduced")
        terms = self._small[:5]
        total = terms[0] + terms[2]
        normal = torch.stack([terms[0] / total, terms[1] / total**2, terms[2] / total, terms[3] / total**2])
        halves = Halves.of(normal)
        return halves, terms[4] / total - halves.residual

    def _split_signed(self) -> dict[int, Tensor]:
        if self._signed_sum is None:
            raise RuntimeError("a geometry's step was finished before it was reduced")
        indices = self.setup.signed
        pieces = torch.split(self._signed_sum, [self.setup.parameters[i].numel() for i in indices])
        return {
            i: piece.view(self.setup.parameters[i].shape) for i, piece in zip(indices, pieces, strict=True)
        }

    def _finish_sign(self, signed: Mapping[int, Tensor], halves: Halves, root: Tensor, nan: Tensor) -> Tensor:
        there = [i for i in self.setup.signed if i in self.means]
        norms = _scaled(sign.finish([self.means[i] for i in there], [signed[i] for i in there], halves), root)
        before, memory = self.setup.memory.norms, self.setup.memory
        memory.norms = norms if before is None else _kept(before, norms)
        return nan if before is None else _pair(paired_moments(before, norms))

    def _finish_spectral(
        self, signed: Mapping[int, Tensor], halves: Halves, spread: Tensor, root: Tensor, nan: Tensor
    ) -> Tensor:
        if self._small is None:
            raise RuntimeError("a geometry's step was finished before it was reduced")
        setup = self.setup
        rows = [min(_matrix_shape(setup.parameters[i])) for i in setup.matrices]
        pieces = torch.split(self._small[5:], [m * m for m in rows])
        # As Sampling.local_sq: over ranks, sum_k w_k g_k g_k' is this times 1/R, or N/R^2 for token weights.
        if setup.sampling.loss_reduction == "global_mean":
            after: Tensor | float = (self._small[0] + self._small[2]) / self.divisor**2
        else:
            after = 1.0 / self.divisor
        products = {
            i: piece.view(m, m) * after for i, piece, m in zip(setup.matrices, pieces, rows, strict=True)
        }
        there = [i for i in setup.matrices if i in self.means]
        norms = spectral.finish(
            [self.means[i] for i in there],
            [signed[i] for i in there],
            [products[i] for i in there],
            halves,
            spread=spread,
        )
        current = spectral.SpectralNorms(
            norms=_scaled(norms.norms, root), covariances=tuple(c * root.square() for c in norms.covariances)
        )
        memory = setup.memory
        if memory.covariances is None or len(memory.covariances.covariances) != len(current.covariances):
            memory.covariances = spectral.first_memory(current)
            return nan
        before = memory.covariances
        moments, after_it = spectral.pooled_moments(before, current)
        good = torch.isfinite(current.norms.plain) & torch.isfinite(current.norms.noise)
        memory.covariances = spectral.SpectralMemory(
            norms=_kept(before.norms, after_it.norms),
            covariances=tuple(
                torch.where(good, new, old)
                for old, new in zip(before.covariances, after_it.covariances, strict=True)
            ),
            steps=after_it.steps,
        )
        return _pair(moments)

    def _let_go(self) -> None:
        self.signed.clear()
        self.products.clear()
        self.means.clear()
        self.weighing = [None] * len(self.setup.parameters)
        self._signed_sum = None


def _matrices(parameters: Sequence[Tensor], optimizer: Optimizer) -> list[int]:
    """Indices of the parameters that spectral descent steps on."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [i for i, p in enumerate(parameters) if p.dim() >= 2 and id(p) in own]


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    rows = parameter.shape[0]
    return rows, parameter.numel() // max(rows, 1)


def _scaled(norms: Norms, factor: Tensor) -> Norms:
    return Norms(
        noise=norms.noise * factor, plain=norms.plain * factor, extrapolated=norms.extrapolated * factor
    )


def _kept(before: Norms, after: Norms) -> Norms:
    """The later step's, unless it was not finite; without waiting for the device to say so."""
    good = torch.isfinite(after.plain) & torch.isfinite(after.noise) & torch.isfinite(after.extrapolated)
    return Norms(
        noise=torch.where(good, after.noise, before.noise),
        plain=torch.where(good, after.plain, before.plain),
        extrapolated=torch.where(good, after.extrapolated, before.extrapolated),
    )


def _pair(moments: DeviceMoments) -> Tensor:
    return torch.stack([moments.trace_covariance, moments.true_grad_sq_norm])
