"""How far the sign and spectral noise scales are off, by signal, noise and batch.

    python -m tests.benchmarks.geometry_bias [--steps 1000] [--only sign]

Prints, for noise of a known noise scale and for per-example gradients of small nets on the handwritten
digits, the estimated noise scale over the true one: 1 is right, 2 is twice too large. `plain` takes the
norm of the averaged gradient for the true gradient's, `extrapolated` takes the extrapolation, `product` the
geometric mean of the two, which is what noisescale.hooks.geometry gives; `prior` assumes a Gaussian
prior per tensor, and `8 steps` extrapolates the average of eight steps' gradients.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from noisescale.hooks.digits import digits, distorted, net
from noisescale.hooks.geometry import halves as halving
from noisescale.hooks.geometry import sign, spectral
from noisescale.hooks.geometry.halves import Halves, Norms

RATIOS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Of the true noise scale to the batch."""

Step = tuple[list[list[Tensor]], Sequence[int]]
"""Per sample its mean gradient, a tensor per parameter; and the samples' sizes."""


def measured_step(
    samples: Sequence[Sequence[Tensor]], counts: Sequence[int], *, weights: Sequence[float] | None = None
) -> tuple[list[Tensor], list[Tensor], Halves, float]:
    """What a job has after the all-reduce: averaged gradient, signed sums, halves, spread."""
    weights = weights or [1 / len(counts)] * len(counts)
    signed: list[Tensor] | None = None
    means = [torch.zeros_like(g) for g in samples[0]]
    terms = torch.zeros(4, dtype=torch.float64)
    for k, (gradients, n, w) in enumerate(zip(samples, counts, weights, strict=True)):
        half = halving.half_sign(rank=k)
        signed = halving.add_signed(gradients, half=half, weight=w, into=signed)
        for mean, g in zip(means, gradients, strict=True):
            mean.add_(g, alpha=w)
        terms += halving.half_terms(half=half, weight=w, count=n, device=terms.device)
    assert signed is not None
    spread = sum(w * (1 - w) / n for w, n in zip(weights, counts, strict=True))
    return means, signed, Halves.of(terms), spread


def sign_norms(samples: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> Norms:
    """The l1 norms of one step."""
    means, signed, sizes, _ = measured_step(samples, counts)
    return sign.finish(means, signed, sizes)


def spectral_norms(samples: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> spectral.SpectralNorms:
    """The nuclear norms of one step."""
    means, signed, sizes, spread = measured_step(samples, counts)
    products: list[Tensor] | None = None
    for gradients in samples:
        products = spectral.add_products(gradients, weight=1 / len(counts), into=products)
    assert products is not None
    return spectral.finish(means, signed, products, sizes, spread=spread)


@dataclass
class Tally:
    """Sums over steps for every way of estimating."""

    matrices: bool = False
    steps: int = 0
    noise: float = 0.0
    plain: float = 0.0
    extrapolated: float = 0.0
    paired_noise: float = 0.0
    paired_signal: float = 0.0
    prior: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    averaged: list[float] = field(default_factory=list)
    previous: Norms | None = None
    memory: spectral.SpectralMemory | None = None
    eight: list[list[Tensor]] = field(default_factory=list)

    def add(self, samples: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> None:
        """One step's samples."""
        self.steps += 1
        if self.matrices:
            current = spectral_norms(samples, counts)
            norms = current.norms
            if self.memory is None:
                self.memory = spectral.first_memory(current)
            else:
                found, self.memory = spectral.pooled_moments(self.memory, current)
                self._pair(*_pair_of(found))
        else:
            norms = sign_norms(samples, counts)
            if self.previous is not None:
                self._pair(*_pair_of(halving.paired_moments(self.previous, norms)))
            self.previous = norms
            self._prior(samples, counts)
        self._eight_steps(samples)
        self.noise += norms.noise.item()
        self.plain += norms.plain.item()
        self.extrapolated += norms.extrapolated.item()

    def _pair(self, noise: float, signal: float) -> None:
        self.paired_noise += noise
        self.paired_signal += signal

    def _prior(self, samples: Sequence[Sequence[Tensor]], counts: Sequence[int]) -> None:
        """|G|^2 per tensor, from which a Gaussian prior has ||G||_1 = sqrt(2 d / pi) |G|."""
        total, k = sum(counts), len(counts)
        for index, tensors in enumerate(zip(*samples, strict=True)):
            mean = sum(tensors[1:], tensors[0]) / k
            local = sum(float(t.square().sum()) for t in tensors) / k
            whole = float(mean.square().sum())
            self.prior[index] = self.prior.get(index, 0.0) + whole - (local - whole) / (k - 1)
            self.sizes[index] = tensors[0].numel()
        assert total > 0

    def _eight_steps(self, samples: Sequence[Sequence[Tensor]]) -> None:
        """Extrapolate from the average of eight steps' gradients; even steps are one half."""
        self.eight.append([sum(ts[1:], ts[0]) / len(samples) for ts in zip(*samples, strict=True)])
        if len(self.eight) == 8:
            if self.matrices:
                self.averaged.append(spectral_norms(self.eight, [1] * 8).norms.extrapolated.item())
            else:
                self.averaged.append(sign_norms(self.eight, [1] * 8).extrapolated.item())
            self.eight.clear()

    def results(self, truth: float) -> dict[str, float]:
        """Estimated over true noise scale, for each way; NaN where the signal came out negative."""
        noise = self.noise / self.steps
        prior = sum(
            math.sqrt(max(sq / self.steps, 0.0) * self.sizes[index] * 2 / math.pi)
            for index, sq in self.prior.items()
        )
        ways = {
            "plain": self.plain / self.steps,
            "extrapolated": self.extrapolated / self.steps,
            "prior": prior,
            "8 steps": sum(self.averaged) / max(len(self.averaged), 1),
        }
        found = {name: (noise / norm) ** 2 / truth if norm > 0 else math.nan for name, norm in ways.items()}
        ratio = self.paired_noise / self.paired_signal / truth
        return {"plain": found["plain"], "product": ratio if ratio > 0 else math.nan} | {
            name: found[name] for name in ("extrapolated", "prior", "8 steps")
        }


def _pair_of(moments: halving.DeviceMoments) -> tuple[float, float]:
    return moments.trace_covariance.item(), moments.true_grad_sq_norm.item()


SIGNALS: dict[str, Callable[[Tensor], Tensor]] = {
    "all coordinates alike": lambda sd: torch.ones_like(sd),
    "in proportion to the noise": lambda sd: sd.clone(),
    "Gaussian": lambda sd: torch.randn_like(sd),
    "Laplace": lambda sd: torch.empty_like(sd).exponential_() * (torch.rand_like(sd) - 0.5).sign(),
    "10% of the coordinates": lambda sd: torch.randn_like(sd) * (torch.rand_like(sd) < 0.1),
    "1% of the coordinates": lambda sd: torch.randn_like(sd) * (torch.rand_like(sd) < 0.01),
}


def student(shape: Sequence[int], *, examples: int) -> Tensor:
    """Means of so many draws of Student's t with 5 degrees of freedom, unit variance each draw."""
    draws = torch.distributions.StudentT(5.0).sample((examples, *shape)) * math.sqrt(3 / 5)
    return draws.mean(0) * math.sqrt(examples)


def sign_cells(*, dimension: int) -> Iterator[tuple[str, Tensor, Tensor, Callable[[], Tensor]]]:
    """Name, true gradient, standard deviations, and a draw of unit noise (of a mean of 32 examples)."""
    alike = torch.ones(dimension)
    uneven = torch.randn(dimension).exp()
    gaussian = lambda: torch.randn(dimension)  # noqa: E731  it is passed on
    mix = torch.randn(dimension, 20) / math.sqrt(20)
    mix /= mix.norm(dim=1, keepdim=True)
    for name, make in SIGNALS.items():
        if name != "in proportion to the noise":
            yield f"signal {name}, noise alike", make(alike), alike, gaussian
        if not name.startswith("all"):
            yield f"signal {name}, noise uneven", make(uneven), uneven, gaussian
    heavy = lambda: student((dimension,), examples=32)  # noqa: E731
    yield "signal Gaussian, noise heavy-tailed", SIGNALS["Gaussian"](alike), alike, heavy
    low = lambda: mix @ torch.randn(20)  # noqa: E731
    yield "signal Gaussian, noise of rank 20", SIGNALS["Gaussian"](alike), alike, low


def print_sign(*, steps: int, dimension: int) -> None:
    """The l1 noise scale on known noise: 2 ranks of 32 examples."""
    for name, direction, deviation, draw in sign_cells(dimension=dimension):
        say(f"\nsign, {name}")
        for ratio in RATIOS:
            noise_norm = float(deviation.sum())
            true = direction * noise_norm / math.sqrt(ratio * 64) / float(direction.abs().sum())
            tally = Tally()
            for _ in range(steps):
                tally.add([[true + deviation * draw() / math.sqrt(32)] for _ in range(2)], [32, 32])
            print_row(ratio, tally.results(ratio * 64))


def spectral_cells() -> Iterator[tuple[str, Tensor, Callable[[int], Tensor], float]]:
    """Name, direction of the true gradient, a draw of so many examples' mean noise, the noise's norm."""
    m, n = 32, 64
    white = lambda count: torch.randn(m, n) / math.sqrt(count)  # noqa: E731
    full = torch.randn(m, n)
    low = torch.randn(m, 2) @ torch.randn(2, n)
    yield "signal of full rank, noise white", full, white, m * math.sqrt(n)
    yield "signal of rank 2, noise white", low, white, m * math.sqrt(n)
    rows = torch.linspace(-2, 2, m).exp()[:, None]
    columns = torch.linspace(2, -2, n).exp()[None]
    uneven = lambda count: rows * columns * torch.randn(m, n) / math.sqrt(count)  # noqa: E731
    norm = float(rows.sum() * columns.norm())
    yield "signal of full rank, noise uneven", full, uneven, norm
    yield "signal as the noise, noise uneven", rows * columns * full, uneven, norm
    # As a linear layer's: an outer product per example.
    outer = lambda count: (  # noqa: E731
        torch.einsum("ei,ej->ij", rows[:, 0] * torch.randn(count, m), columns[0] * torch.randn(count, n))
        / count
    )
    yield "signal as the noise, an outer product per example", rows * columns * full, outer, norm


def print_spectral(*, steps: int) -> None:
    """The nuclear noise scale on known noise."""
    for name, direction, draw, noise_norm in spectral_cells():
        for ranks in (2, 8):
            say(f"\nspectral, {name}, {ranks} ranks")
            nuclear = float(torch.linalg.svdvals(direction).sum())
            for ratio in RATIOS:
                true = direction * noise_norm / math.sqrt(ratio * 64) / nuclear
                tally = Tally(matrices=True)
                for _ in range(steps):
                    count = 64 // ranks
                    tally.add([[true + draw(count)] for _ in range(ranks)], [count] * ranks)
                print_row(ratio, tally.results(ratio * 64))


def per_example_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    """By brute force: a tensor per parameter, one row per example."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, given, (image[None],)), label[None])

    return list(vmap(grad(loss), in_dims=(None, 0, 0))(parameters, images, labels).values())


def perceptron() -> nn.Module:
    """A net of matrices: 64-128-64-10."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def true_noise_scale(gradients: Sequence[Tensor], *, kind: str) -> float:
    """From all examples' gradients, by the definition."""
    noise = signal = 0.0
    for g in gradients:
        mean = g.mean(0)
        if kind == "sign":
            noise += float(g.std(0, correction=0).sum())
            signal += float(mean.abs().sum())
        elif mean.dim() > 1:
            centred = torch.stack([spectral.as_matrix(x) for x in g - mean])
            covariance = torch.einsum("eij,ekj->ik", centred, centred) / len(g)
            noise += float(torch.linalg.eigvalsh(covariance.double()).clamp_min(0).sqrt().sum())
            signal += float(torch.linalg.svdvals(spectral.as_matrix(mean)).sum())
    return (noise / signal) ** 2


def digits_nets() -> Iterator[tuple[str, list[Tensor]]]:
    """Per-example gradients over the training images, at points of a training by AdamW."""
    images, labels = digits()[0].tensors
    images = distorted(images)
    for name, make in (("convolutional net", net), ("perceptron", perceptron)):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        done = 0
        for until in (20, 100, 400):
            for _ in range(until - done):
                chosen = torch.randint(0, len(images), (64,))
                optimizer.zero_grad()
                functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
                optimizer.step()
            done = until
            yield f"{name}, step {until}", per_example_gradients(model, images, labels)


def print_digits(*, steps: int) -> None:
    """Both noise scales on real gradients."""
    for name, gradients in digits_nets():
        for kind in ("sign", "spectral"):
            chosen = gradients if kind == "sign" else [g for g in gradients if g.dim() > 2]
            truth = true_noise_scale(chosen, kind=kind)
            say(f"\n{kind}, {name}, true noise scale {truth:.0f}")
            for total, ranks in ((16, 2), (64, 2), (64, 8), (256, 2), (1024, 2)):
                tally = Tally(matrices=kind == "spectral")
                for _ in range(steps):
                    picks = torch.randint(0, len(chosen[0]), (ranks, total // ranks))
                    tally.add([[g[pick].mean(0) for g in chosen] for pick in picks], [total // ranks] * ranks)
                print_row(truth / total, tally.results(truth), note=f"N={total}, {ranks} ranks")


def print_row(ratio: float, results: dict[str, float], *, note: str = "") -> None:
    """One line of a table."""
    cells = "  ".join(f"{name} {value:7.2f}" for name, value in results.items())
    say(f"  noise scale / batch {ratio:7.2f}:  {cells}  {note}".rstrip())


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)  # noqa: T201  a command's own output


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1000, help="per cell (default: %(default)s)")
    parser.add_argument("--only", choices=("sign", "spectral", "digits"))
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.only in (None, "sign"):
        print_sign(steps=given.steps, dimension=4000)
    if given.only in (None, "spectral"):
        print_spectral(steps=max(given.steps // 5, 16))
    if given.only in (None, "digits"):
        print_digits(steps=max(given.steps // 5, 16))


if __name__ == "__main__":
    main()
