"""The harness qload tests itself with, for other people's formats and kernels too.

    from qload.testing import assert_reads_back, layers

    @given(layers(GPTQWeight, st.just(GPTQConfig(bits=4, group_size=32, positional=True))))
    def test_my_kernel(stored):
        weight = stored.weight()
        assert_reads_back(lambda x: my_kernel(x, weight.qweight, ...), weight, torch.float16)

`python -m qload.testing.faults` breaks qload on purpose and prints which tests notice.
"""

from qload.testing.checks import (
    assert_reads_back,
    assert_same_bits,
    assert_sums_exactly,
    assert_within_bound,
)
from qload.testing.strategies import DrawnLayer, layers

__all__ = [
    "DrawnLayer",
    "assert_reads_back",
    "assert_same_bits",
    "assert_sums_exactly",
    "assert_within_bound",
    "layers",
]
