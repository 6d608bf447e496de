"""What may notice a wrong kernel: the checks of `qload.testing`, and tolerances that are in wide use.

The tolerances are here to be tried, and nowhere else: `cosine` above .99, as of activations; `mean relative`
error under .04, as Marlin's tests have it; `allclose` with rtol .2 and atol .2.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qload.spec import Weight
from qload.testing.checks import Kernel, Misread, assert_reads_back, assert_within_bound

TOKENS = 32  # more than a tile of sixteen
READS = "read back"
COSINE, MEAN_RELATIVE, CLOSE = 0.99, 0.04, 0.2

Oracle = Callable[[Kernel, Weight, torch.dtype], bool]  # whether all is well


def _passes(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return False
    return True


def read_back(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """One-hot inputs return the weight's columns."""
    return _passes(partial(assert_reads_back, kernel, weight, dtype))


def misread(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> tuple[bool, str | None]:
    """Whether one-hot inputs of `dtype` show a `kernel` that has another `weight`, and its fault's class."""
    try:
        assert_reads_back(kernel, weight, dtype)
    except Misread as error:
        return True, error.diagnosis.fault
    except AssertionError:
        return True, None
    return False, None


def derived_bound(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """No result is further off than rounding can bring it."""
    return _passes(lambda: _within(kernel, weight, dtype))


def _within(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> None:
    assert_within_bound(kernel, weight, activations(weight, dtype))


def cosine(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """The results point in nearly the same direction."""
    got, want = _both(kernel, weight, dtype)
    return float(torch.cosine_similarity(got.flatten(), want.flatten(), 0)) > COSINE


def mean_relative(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """The mean error is a small part of the mean result."""
    got, want = _both(kernel, weight, dtype)
    return float((got - want).abs().mean() / want.abs().mean()) < MEAN_RELATIVE


def close(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """Every result is within a fifth of what it should be, or within 0.2."""
    got, want = _both(kernel, weight, dtype)
    return torch.allclose(got, want, rtol=CLOSE, atol=CLOSE)


def activations(weight: Weight, dtype: torch.dtype) -> Tensor:
    """(M, K), normal, a tenth as large as one: as tests of experts' kernels commonly have them."""
    random = torch.Generator().manual_seed(0)
    return (torch.randn(TOKENS, weight.layer.K, generator=random) / 10).to(dtype)


def _both(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = activations(weight, dtype)
    return kernel(x).double(), x.double() @ weight.dequantize().double().T


# By name; the first two are qload's own, which have to notice every fault.
ORACLES: dict[str, Oracle] = {
    READS: read_back,
    "derived bound": derived_bound,
    "cosine > .99": cosine,
    "mean relative < .04": mean_relative,
    "rtol .2 atol .2": close,
}
OWN = (READS, "derived bound")
