"""What the CUDA operator on ExLlama's order is given, takes and refuses; all of it without a device."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import ExllamaWeight, repack
from qload.kernels.cuda import exllama
from qload.layouts import gptq

pytestmark = pytest.mark.usefixtures("seen_texts")

HALF = torch.float16


def layer(bits: int, K: int = 96, N: int = 64, group: int = 48) -> ExllamaWeight:
    """Codes in order, three groups in turns."""
    weight = GPTQWeight(
        config=GPTQConfig(bits, group),
        qweight=gptq.rows(bits).pack(torch.arange(K * N).reshape(K, N) % 2**bits),
        qzeros=torch.zeros(K // group, N * bits // 32, dtype=torch.int32),
        scales=torch.ones(K // group, N, dtype=HALF),
        g_idx=(torch.arange(K) % (K // group)).to(torch.int32),
    )
    made = repack(weight, "exllama")
    assert isinstance(made, ExllamaWeight)
    return made


def call(M: int, weight: ExllamaWeight) -> exllama.ExllamaCall:
    return exllama.ExllamaCall(*exllama.arguments(torch.zeros(M, 96, dtype=HALF), weight))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_call_knows_the_layer_from_its_tensors(bits: int) -> None:
    made = call(5, layer(bits))

    assert (made.tokens, made.shape, made.bytes) == (5, (96, 64, 2), 96 * 64 * bits // 8)
    assert (made.bits, made.convention, made.perm is None) == (bits, "stored minus one", False)


def test_each_kernel_says_how_many_tokens_it_takes() -> None:
    few, large = exllama.KERNELS
    weight = layer(4)

    assert (few.why_not(call(64, weight)), large.why_not(call(65, weight))) == (None, None)
    assert few.why_not(call(65, weight)) == "takes at most 64 tokens, got 65"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        pytest.param({"bits": 5}, "bits", id="a width that no kernel reads"),
        pytest.param({"convention": "twice"}, "convention", id="zero points that mean something else"),
        pytest.param({"x": torch.zeros(2, 64, dtype=HALF)}, "x", id="another K"),
        pytest.param({"x": torch.zeros(2, 96)}, "x", id="float32 activations"),
        pytest.param({"scales": torch.ones(2, 64)}, "scales", id="float32 scales"),
        pytest.param({"zeros": torch.zeros(3, 8, dtype=torch.int32)}, "zeros", id="more groups"),
        pytest.param({"g_idx": torch.zeros(95, dtype=torch.int32)}, "g_idx", id="a row without a group"),
        pytest.param({"bias": torch.zeros(63, dtype=HALF)}, "bias", id="a column without a bias"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Tensor], named: str) -> None:
    exllama.checked(call(2, layer(4)))

    with pytest.raises(ArgumentError) as refused:
        exllama.checked(replace(call(2, layer(4)), **changed))
    assert str(refused.value).startswith(named)


def test_the_shape_of_y_is_known_without_a_device() -> None:
    x, *read = exllama.arguments(torch.zeros(3, 96, dtype=HALF), layer(3))
    there = [tensor.to("meta") if isinstance(tensor, Tensor) else tensor for tensor in read]

    y = torch.ops.qload.exllama(x.to("meta"), *there)

    assert (y.shape, y.dtype) == ((3, 64), HALF)


def test_a_weight_on_the_cpu_is_not_for_this_operator() -> None:
    reason = exllama.why_not(layer(4), HALF)

    assert reason == "needs a CUDA device of capability 8.0, the weight is on cpu"
