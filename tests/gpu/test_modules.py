"""Modules of typed weights on a device, as a model holds them."""

import pytest
import torch

from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.gpu import exllama_layers
from tests.gpu.layers import inputs, layer

pytestmark = pytest.mark.gpu


def made(layout: str) -> Weight:
    if layout == "exllama":
        return exllama_layers.layer(1024, 320, 128, 4)
    return layer(1024, 320, 128, True, layout=layout)


@pytest.mark.parametrize("M", [1, 33, 300])
@pytest.mark.parametrize("layout", ["marlin", "strips", "exllama"])
def test_a_compiled_module_of_a_typed_weight_is_one_graph(layout: str, M: int) -> None:
    weight = made(layout)
    module, x = weight.get_linear(), inputs(M, weight, torch.float16)

    with torch.no_grad():
        assert_same_bits(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))
