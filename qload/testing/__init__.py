"""The harness qload tests itself with, for other people's formats and kernels too.

    from qload.testing import assert_reads_back, layers

    @given(layers("gptq", groups=(128,)))  # 4 bits, symmetric, in order: what every GPTQ kernel takes
    def test_my_kernel(stored):
        weight = stored.weight()
        assert_reads_back(lambda x: my_kernel(x, weight.qweight, ...), weight, torch.float16)

`qload.conformance` has whole suites of such tests. Names are imported when they are first used, and
torch with them.
The strategies need Hypothesis, which `pip install "qload-weights[testing]"` brings; the checks do without.
`python -m qload.testing.faults` breaks qload on purpose and prints which tests notice.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
