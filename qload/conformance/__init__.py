"""Test suites for kernels, loaders and packers of other projects: derive from one, and pytest runs it.

    from qload.conformance import LinearKernelSuite

    class TestMine(LinearKernelSuite):
        format = "gptq"

        def pack(self, weight):
            return my_repack(weight.qweight, weight.scales)

        def gemm(self, x, buffers):
            return my_kernel(x, *buffers)

        def can_implement(self, case):
            return case.symmetric and not case.act_order, "symmetric weights in order only"

Names are imported on first use, and torch when the first test runs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
