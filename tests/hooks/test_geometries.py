"""Adam's, sign descent's and Muon's noise scales, measured in training, are what brute force says."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import noisescale
from noisescale.blocks import Block
from noisescale.errors import InvalidInputError
from noisescale.estimate import estimate
from noisescale.hooks.geometry.halves import Halves, add_signed, half_sign, half_terms, paired_moments
from noisescale.hooks.geometry.sign import finish as finish_sign
from noisescale.hooks.geometry.spectral import SpectralNorms, add_products, first_memory, pooled_moments
from noisescale.hooks.geometry.spectral import finish as finish_spectral
from noisescale.moments import SampleGeometry, step_moments
from tests.hooks.ranks import Rank, Ranks
from tests.hooks.test_micro_batches import accumulate
from tests.hooks.training import Reports, loss_of, same_bits, small_net

ALL = ("adam", "sign", "spectral")


def samples_of(model: nn.Module, batches: Sequence[tuple[int, int, int]]) -> list[list[Tensor]]:
    """Per sample (rank, number, count) the mean gradient of every parameter, float64."""
    found = []
    for rank, number, count in batches:
        model.zero_grad()
        loss_of(model, rank, number, count).backward()
        found.append([p.grad.double().clone() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


class Reference:
    """The same moments from all samples of a step on one process, float64, with no communication."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float]]] = {name: [] for name in ALL}
        self._sign: Any = None
        self._spectral: Any = None

    def step(
        self,
        samples: list[list[Tensor]],
        *,
        counts: Sequence[int],
        halves: Sequence[int],
        second: list[Tensor] | None,
        steps: int,
        beta2: float,
        eps: float,
    ) -> None:
        weights = [1 / len(samples)] * len(samples)
        geometry = SampleGeometry.of(counts=counts, weights=weights)
        means = [torch.stack(list(row)).mean(dim=0) for row in zip(*samples, strict=True)]
        if second is not None:
            inverse = [1 / ((v.double() / (1 - beta2**steps)).sqrt() + eps) for v in second]

            def square(gradients: list[Tensor]) -> float:
                return sum(float((p * g * g).sum()) for p, g in zip(inverse, gradients, strict=True))

            moments = step_moments(
                local_sq=sum(square(s) for s in samples) / len(samples),
                global_sq=square(means),
                geometry=geometry,
            )
            self.found["adam"].append((moments.trace_covariance, moments.true_grad_sq_norm))
        signed: list[Tensor] | None = None
        terms = torch.zeros(4, dtype=torch.float64)
        products: list[Tensor] | None = None
        matrices = [i for i, g in enumerate(means) if g.dim() >= 2]
        for sample, count, half, weight in zip(samples, counts, halves, weights, strict=True):
            signed = add_signed(sample, half=half, weight=weight, into=signed)
            products = add_products([sample[i] for i in matrices], weight=weight, into=products)
            terms += half_terms(half=half, weight=weight, count=count, device=torch.device("cpu"))
        assert signed is not None
        assert products is not None
        sizes = Halves.of(terms)
        norms = finish_sign(means, signed, sizes)
        if self._sign is not None:
            pair = paired_moments(self._sign, norms)
            self.found["sign"].append((float(pair.trace_covariance), float(pair.true_grad_sq_norm)))
        self._sign = norms
        current: SpectralNorms = finish_spectral(
            [means[i] for i in matrices],
            [signed[i] for i in matrices],
            products,
            sizes,
            spread=geometry.spread,
        )
        if self._spectral is None:
            self._spectral = first_memory(current)
        else:
            pair, self._spectral = pooled_moments(self._spectral, current)
            self.found["spectral"].append((float(pair.trace_covariance), float(pair.true_grad_sq_norm)))

    def sums(self) -> dict[str, tuple[float, float]]:
        return {
            name: (sum(s for s, _ in pairs), sum(g for _, g in pairs)) for name, pairs in self.found.items()
        }


def sums_by_geometry(reports: Reports) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for entry in (entry for report in reports for block in report.blocks for entry in block.sums):
        trace, signal = found.get(entry.geometry, (0.0, 0.0))
        found[entry.geometry] = (trace + entry.trace_covariance, signal + entry.true_grad_sq_norm)
    return found


def geometry_job(
    rank: Rank, *, micro_batches: int, samples: str, every: int = 1
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]], bool]:
    """9 steps of Adam; measured and wanted sums, and whether the weights are those of training without."""
    reports, reference = Reports(), Reference()
    results: list[dict[str, Tensor]] = []
    for measured in (False, True):
        model = DistributedDataParallel(small_net(), bucket_cap_mb=0.001)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95))
        monitor = None
        if measured:
            monitor = noisescale.attach(
                model,
                optimizer,
                every=1,
                report_to=reports,
                samples=samples,  # type: ignore[arg-type]  # a parameter of the test
                geometry=ALL,
                geometry_every=every,
            )
        for step in range(9):
            if measured and rank.rank == 0 and step % every == 0:
                refer(reference, model.module, optimizer, rank, step, micro_batches, samples)
            accumulate(model, optimizer, rank=rank.rank, step=step, counts=(8,) * micro_batches)
            optimizer.step()
        if monitor is not None:
            monitor.close()
        results.append({n: v.detach().clone() for n, v in model.module.state_dict().items()})
    return sums_by_geometry(reports), reference.sums(), same_bits(*results)


def refer(
    reference: Reference,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: Rank,
    step: int,
    micro_batches: int,
    by: str,
) -> None:
    alone = small_net()
    alone.load_state_dict(model.state_dict())
    states = [optimizer.state.get(p) for p in model.parameters()]
    second = [s["exp_avg_sq"] for s in states if s] or None
    numbers = [(r, step * micro_batches + j) for r in range(rank.world_size) for j in range(micro_batches)]
    rows = samples_of(alone, [(r, n, 8) for r, n in numbers])
    counts = [8] * len(rows)
    halves = [half_sign(rank=r, micro_batch=n % micro_batches) for r, n in numbers]
    if by == "rank":
        rows = [
            [
                torch.stack(list(g)).mean(dim=0)
                for g in zip(*rows[r * micro_batches :][:micro_batches], strict=True)
            ]
            for r in range(rank.world_size)
        ]
        counts = [8 * micro_batches] * rank.world_size
        halves = [half_sign(rank=r) for r in range(rank.world_size)]
    group = optimizer.param_groups[0]
    reference.step(
        rows,
        counts=counts,
        halves=halves,
        second=second,
        steps=step,
        beta2=group["betas"][1],
        eps=group["eps"],
    )


@pytest.mark.parametrize(
    ("micro_batches", "samples"), [(1, "rank"), (2, "rank"), (1, "micro_batch"), (3, "micro_batch")]
)
def test_geometries_equal_the_reference(two_ranks: Ranks, micro_batches: int, samples: str) -> None:
    """On 2 ranks, by rank and by micro-batch, each geometry's moments are those of float64 gradients."""
    answers = two_ranks.run(geometry_job, micro_batches=micro_batches, samples=samples)
    assert [same for _, _, same in answers] == [True, True]
    found, wanted, _ = answers[0]
    assert set(found) == {"euclidean", *ALL}
    for name in ALL:
        assert found[name][0] == pytest.approx(wanted[name][0], rel=1e-3), name
        assert found[name][1] == pytest.approx(wanted[name][1], rel=1e-3, abs=1e-4 * wanted[name][0]), name


def test_geometries_on_three_ranks(three_ranks: Ranks) -> None:
    """With 3 ranks the halves are of 2 and 1 samples."""
    found, wanted, same = three_ranks.run(geometry_job, micro_batches=1, samples="rank")[0]
    assert same
    for name in ALL:
        assert found[name][0] == pytest.approx(wanted[name][0], rel=1e-3), name


def test_geometries_are_sampled(two_ranks: Ranks) -> None:
    """geometry_every=4 of 9 measured steps: steps 0, 4 and 8, of which Adam's first has no state yet."""
    found, wanted, _ = two_ranks.run(geometry_job, micro_batches=1, samples="rank", every=4)[0]
    for name in ALL:
        assert found[name][0] == pytest.approx(wanted[name][0], rel=1e-3), name


def solo_blocks(geometry: Any, optimizer: type[torch.optim.Optimizer], *, steps: int = 40) -> list[Block]:
    """One process with 4 micro-batches a step."""
    model = small_net()
    made = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]  # every optimizer here has one
    reports = Reports()
    with noisescale.attach(
        model, made, every=1, report_to=reports, samples="micro_batch", geometry=geometry, geometry_every=2
    ):
        for step in range(steps):
            accumulate(model, made, rank=0, step=step, counts=(8,) * 4)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            made.step()
    return [block for report in reports for block in report.blocks]


def test_advice_uses_the_geometry_that_fits() -> None:
    """A run of Adam that measured "adam" is advised by that, and says so; without it by the euclidean one."""
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    answers = []
    for geometry in ("euclidean", "adam"):
        with noisescale.attach(
            model, optimizer, every=1, samples="micro_batch", geometry=geometry, geometry_every=1
        ) as monitor:
            for step in range(30):
                accumulate(model, optimizer, rank=0, step=step, counts=(8,) * 4)
                optimizer.step()
            answers.append(monitor.recommend())
        monitor.detach()
    assert answers[0].noise_scale.geometry == "euclidean"
    assert any("stands in" in assumption for assumption in answers[0].assumed)
    assert answers[1].noise_scale.geometry == "adam"
    assert not any("stands in" in assumption for assumption in answers[1].assumed)


def test_one_process_measures_every_geometry() -> None:
    """In one process the sums of each geometry are of the steps it was sampled on."""
    blocks = solo_blocks(ALL, torch.optim.Adam)
    for name, steps in (("adam", 19), ("sign", 19), ("spectral", 19)):
        found = estimate(blocks, geometry=name)  # type: ignore[arg-type]  # one of them
        assert found.measured_steps == steps, name
        assert found.trace_covariance is not None
        assert found.trace_covariance > 0
    assert estimate(blocks).measured_steps == 40


def test_known_sign_noise() -> None:
    """Gaussian gradients with known sigma and G in every coordinate: B_sign within 10% of the truth.

    The signal is chosen well above the averaged gradient's noise, where the estimate is nearly unbiased;
    docs/geometries.md has the bias elsewhere.
    """
    generator = torch.Generator().manual_seed(0)
    dimension, micro, count = 512, 8, 32
    model = nn.Linear(dimension, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reports = Reports()
    with noisescale.attach(
        model, optimizer, every=1, report_to=reports, samples="micro_batch", geometry="sign", geometry_every=1
    ):
        for _ in range(60):
            optimizer.zero_grad()
            for _ in range(micro):
                inputs = torch.randn(count, dimension, generator=generator) + 0.3
                (model(inputs).mean() / micro).backward()
            optimizer.step()
    blocks = [block for report in reports for block in report.blocks]
    found = estimate(blocks, geometry="sign")
    assert found.noise_scale == pytest.approx(1 / 0.3**2, rel=0.1)


def test_sgd_has_no_second_moments() -> None:
    """geometry="adam" with an optimizer that keeps none: the euclidean one alone is reported."""
    blocks = solo_blocks("adam", torch.optim.SGD)
    assert estimate(blocks, geometry="adam").measured_steps == 0
    assert estimate(blocks).measured_steps == 40


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"geometry": "hyperbolic"}, "euclidean, adam, sign, spectral"),
        ({"geometry": ["adam", "norm_layers"]}, "norm_layers"),
        ({"geometry": "adam", "geometry_every": 0}, "geometry_every"),
        ({"geometry": "adam", "geometry_every": True}, "geometry_every"),
    ],
)
def test_wrong_geometries(arguments: dict[str, Any], words: str) -> None:
    """What is no geometry, or no interval, is refused."""
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with pytest.raises(InvalidInputError) as raised:
        noisescale.attach(model, optimizer, samples="micro_batch", **arguments)
    assert words in str(raised.value)


def test_spectral_needs_matrices() -> None:
    """A model of vectors alone has nothing spectral."""
    model = nn.LayerNorm(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(InvalidInputError, match="two dimensions"):
        noisescale.attach(model, optimizer, samples="micro_batch", geometry="spectral")
