"""Random layers, exact checks, emulated kernels and planted faults, for tests of formats and kernels.

    from qload.testing import assert_reads_back, layers

    @given(layers("gptq", groups=(128,)))  # 4 bits, symmetric, in order: supported by every GPTQ kernel
    def test_my_kernel(stored):
        weight = stored.weight()
        assert_reads_back(lambda x: my_kernel(x, weight.qweight, ...), weight, torch.float16)

`qload.conformance` has whole suites of such tests. Names are imported on first use, and torch with them.
The strategies need Hypothesis, from `pip install "qload-weights[testing]"`; the checks do not.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
