"""The harness qload tests itself with, for other people's formats and kernels too.

    from qload.testing import assert_reads_back, layers

    @given(layers(GPTQWeight, st.just(GPTQConfig(bits=4, group_size=32, positional=True))))
    def test_my_kernel(stored):
        weight = stored.weight()
        assert_reads_back(lambda x: my_kernel(x, weight.qweight, ...), weight, torch.float16)

The strategies need Hypothesis, which `pip install "qload-weights[testing]"` brings; the checks do without.
`python -m qload.testing.faults` breaks qload on purpose and prints which tests notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qload.testing.checks import (
    assert_reads_back,
    assert_same_bits,
    assert_sums_exactly,
    assert_within_bound,
)
from qload.testing.make import make_checkpoint

if TYPE_CHECKING:
    from qload.testing.strategies import DrawnLayer, layers

__all__ = [
    "DrawnLayer",
    "assert_reads_back",
    "assert_same_bits",
    "assert_sums_exactly",
    "assert_within_bound",
    "layers",
    "make_checkpoint",
]


def __getattr__(name: str) -> Any:
    """The strategies, imported when they are first asked for."""
    if name in ("DrawnLayer", "layers"):
        return getattr(import_module("qload.testing.strategies"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
