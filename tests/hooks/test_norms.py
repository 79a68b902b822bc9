"""Square norms are float64's to 1e-5, however long, large or small the gradient."""

import pytest
import torch

from noisescale.hooks.norms import square_norm


@pytest.mark.parametrize("count", [1, 4095, 4096, 100_000, 10_000_000, 25_000_000])
@pytest.mark.parametrize("kind", ["random", "constant"])
def test_long_buffers_keep_their_digits(count: int, kind: str) -> None:
    """Within 1e-5 of float64 at up to 25 million elements, random and constant."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator) if kind == "random" else torch.full((count,), 0.1)
    assert square_norm(values).item() == pytest.approx(values.double().square().sum().item(), rel=1e-5)


def test_one_call_would_not_do() -> None:
    """The plain float32 norm of such a buffer is off by more than 1e-3: what the rows are for."""
    values = torch.full((25_000_000,), 0.1)
    plain = torch.linalg.vector_norm(values, dtype=torch.float32).item() ** 2
    assert plain != pytest.approx(250_000, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [300.0, 1e-4])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype, size: float) -> None:
    """Elements of 300 do not overflow and elements of 1e-4 do not vanish."""
    values = torch.full((5000,), size, dtype=dtype)
    wanted = values.double().square().sum().item()
    assert square_norm(values).item() == pytest.approx(wanted, rel=1e-5)


def test_tiny_float32_gradients_do_not_vanish() -> None:
    """Below 1e-19 the float32 square is 0; it is taken in float64."""
    assert square_norm(torch.full((10_000,), 1e-22)).item() == pytest.approx(1e-40, rel=1e-4)


def test_any_shape_counts_whole() -> None:
    """Scalars, empty tensors and non-contiguous ones."""
    assert square_norm(torch.tensor(3.0)).item() == 9
    assert square_norm(torch.empty(0)).item() == 0
    grid = torch.arange(12.0).view(3, 4)
    assert square_norm(grid.t()).item() == square_norm(grid).item() == pytest.approx(506)
