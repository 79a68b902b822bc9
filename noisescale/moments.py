"""One optimizer step: from measured square norms to unbiased moments.

A step has K samples. Sample k is one rank's (or one micro-batch's) mean gradient g_k over
n_k examples, and enters the averaged gradient with weight w_k (sum 1). Two numbers are
measured: A = sum_k w_k |g_k|^2 and Q = |sum_k w_k g_k|^2. From them, for any weights and any
sizes, without bias:

    trace_covariance  = (A - Q) / sum_k [w_k (1 - w_k) / n_k]
    true_grad_sq_norm = Q - trace_covariance * sum_k [w_k^2 / n_k]

With equal n and w = 1/R this is McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noisescale.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class StepMoments:
    """Unbiased moments of one optimizer step.

    Attributes:
        trace_covariance: tr(Sigma), the trace of the per-example gradient covariance.
        true_grad_sq_norm: |G|^2. One step's value may be negative: average it first, clamp
            nothing, divide last.
    """

    trace_covariance: float
    true_grad_sq_norm: float


@dataclass(frozen=True, slots=True)
class SampleGeometry:
    """What the weights and sizes of a step's samples do to the two measured numbers.

    Attributes:
        spread: sum_k w_k (1 - w_k) / n_k, the expectation of A - Q per unit of tr(Sigma).
        residual: sum_k w_k^2 / n_k, the part of tr(Sigma) left in Q; 1/N for equal sizes.
    """

    spread: float
    residual: float

    @classmethod
    def of(cls, *, counts: Sequence[float], weights: Sequence[float]) -> "SampleGeometry":
        """From every sample's size and weight.

        Args:
            counts: n_k, examples (or tokens) behind each sample; all positive.
            weights: w_k, each sample's weight in the averaged gradient; they sum to 1.

        Raises:
            InvalidInputError: Lengths differ, a count is not positive, or weights do not sum to 1.
        """
        if len(counts) != len(weights):
            raise InvalidInputError(
                f"{len(counts)} counts and {len(weights)} weights were given; give one of each per sample",
                field="weights",
            )
        if any(not (n > 0 and math.isfinite(n)) for n in counts):
            raise InvalidInputError(
                f"counts must be positive and finite, got {list(counts)}; leave out samples with no examples",
                field="counts",
            )
        if not math.isclose(math.fsum(weights), 1.0, rel_tol=1e-6):
            raise InvalidInputError(
                f"weights must sum to 1, got {math.fsum(weights)!r}; divide them by their sum",
                field="weights",
            )
        return cls(
            spread=math.fsum(w * (1 - w) / n for n, w in zip(counts, weights, strict=True)),
            residual=math.fsum(w * w / n for n, w in zip(counts, weights, strict=True)),
        )

    @classmethod
    def of_sums(cls, *, weight_over_count: float, squared_weight_over_count: float) -> "SampleGeometry":
        """From sum_k w_k / n_k and sum_k w_k^2 / n_k, for any weights that sum to 1.

        Both are sums over samples, so they may be gathered rank by rank.
        """
        return cls(spread=weight_over_count - squared_weight_over_count, residual=squared_weight_over_count)

    @classmethod
    def equal_weights(cls, *, samples: int, sum_inverse_counts: float) -> "SampleGeometry":
        """Plain averaging, w_k = 1/K, as DDP does whatever the sizes are.

        Only sum_k 1/n_k is needed, so ranks of uneven size need one extra number in the
        all-reduce. (The mean of 1/n_k, not 1 over the mean of n_k.)
        """
        residual = sum_inverse_counts / (samples * samples)
        return cls(spread=residual * (samples - 1), residual=residual)

    @classmethod
    def count_weights(cls, *, samples: int, total_count: float) -> "SampleGeometry":
        """Weights w_k = n_k / N, as a loss divided by the global count gives."""
        return cls(spread=(samples - 1) / total_count, residual=1.0 / total_count)


def step_moments(*, local_sq: float, global_sq: float, geometry: SampleGeometry) -> StepMoments:
    """Unbiased tr(Sigma) and |G|^2 of one step.

    Args:
        local_sq: A, the weighted mean of the samples' |g_k|^2.
        global_sq: Q = |sum_k w_k g_k|^2, the square norm of the averaged gradient.
        geometry: Of this step's samples.

    Raises:
        InvalidInputError: There is only one sample, so no spread between samples to measure.
    """
    if not geometry.spread > 0:
        raise InvalidInputError(
            "one sample per step has no spread to measure; use at least 2 ranks, or sample micro-batches",
            field="geometry",
        )
    trace_covariance = (local_sq - global_sq) / geometry.spread
    return StepMoments(
        trace_covariance=trace_covariance,
        true_grad_sq_norm=global_sq - trace_covariance * geometry.residual,
    )


def two_batch_moments(*, local_sq: float, global_sq: float, small: float, big: float) -> StepMoments:
    """The same from square norms at two batch sizes, McCandlish appendix A.1.

    Args:
        local_sq: |g|^2 of a gradient over `small` examples (mean over such gradients).
        global_sq: |g|^2 of a gradient over `big` examples.

    Raises:
        InvalidInputError: The sizes are not 0 < small < big.
    """
    if not 0 < small < big:
        raise InvalidInputError(
            f"the two batch sizes must be 0 < small < big, got {small} and {big}", field="big"
        )
    return StepMoments(
        trace_covariance=(local_sq - global_sq) / (1 / small - 1 / big),
        true_grad_sq_norm=(big * global_sq - small * local_sq) / (big - small),
    )


def noise_scale(*, trace_covariance: float, true_grad_sq_norm: float) -> float | None:
    """B_simple = tr(Sigma) / |G|^2 (McCandlish 2.9), in examples (or tokens).

    Both must be averages over many steps. None where |G|^2 is not positive: the ratio is then
    undefined, not infinite.
    """
    if not true_grad_sq_norm > 0:
        return None
    return trace_covariance / true_grad_sq_norm


@dataclass(frozen=True, slots=True)
class StepVariance:
    """Variances and covariance of one step's two estimates."""

    trace_covariance: float
    true_grad_sq_norm: float
    covariance: float


def gaussian_step_variance(
    *, samples: int, global_batch_size: float, trace_sigma_sq: float, grad_sigma_grad: float
) -> StepVariance:
    """How noisy one step is, for Gaussian gradients and K equal samples (docs/science.md).

    Args:
        samples: K, at least 2.
        global_batch_size: N.
        trace_sigma_sq: tr(Sigma^2).
        grad_sigma_grad: G' Sigma G.
    """
    shared = 2 * trace_sigma_sq / (samples - 1)
    n = global_batch_size
    return StepVariance(
        trace_covariance=shared,
        true_grad_sq_norm=4 * grad_sigma_grad / n + shared * samples / (n * n),
        covariance=-shared / n,
    )
