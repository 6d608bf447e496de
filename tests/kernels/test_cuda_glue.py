"""The way from a typed weight to the CUDA module and back, its routines computed by hand on CPU tensors.

Which kernel is called, with which pointers, sizes and units: all but the device code.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from qload.errors import NoKernelError
from qload.kernels import products
from qload.kernels.cuda import exllama, launch, linear, module
from qload.kernels.cuda.linear import OPERATORS
from qload.testing import assert_sums_exactly
from qload.testing.checks import exact_sums
from tests.kernels.cuda_by_hand import STREAM, Hand
from tests.kernels.cuda_layers import AMPERE, HOPPER, _operators, byte_layer, hand, layer

__all__ = ["_operators", "hand"]  # fixtures
TOKENS = [1, 16, 17, 64, 65, 256, 257]
SHAPES = [
    pytest.param({"K": 256, "N": 128, "group": 128}, id="groups of 128"),
    pytest.param({"K": 192, "N": 72, "group": 32, "zeros": True}, id="padded columns"),
    pytest.param({"K": 104, "N": 64, "group": -1, "zeros": True}, id="padded rows, one scale a column"),
    pytest.param({"K": 256, "N": 64, "group": 64, "act_order": True}, id="act order"),
    pytest.param({"K": 160, "N": 72, "group": 32, "zeros": True, "act_order": True}, id="padded act order"),
    pytest.param({"K": 768, "N": 64, "group": 256, "zeros": True, "act_order": True}, id="groups of 256"),
]
CHIPS = pytest.mark.parametrize("chip", [AMPERE, HOPPER], ids=["8.0", "9.0"])
BITS = pytest.mark.parametrize("bits", [4, 8], ids=["4 bits", "8 bits"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@CHIPS
@DTYPES
@BITS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("M", TOKENS)
def test_a_layer_in_marlins_order_is_multiplied(
    hand: Hand, shape: dict, bits: int, dtype: torch.dtype, M: int, chip: tuple[int, int]
) -> None:
    weight = layer(**shape, bits=bits, dtype=dtype)

    assert_sums_exactly(lambda x: linear(x, weight), weight, dtype, M=M)

    assert len(hand.called) == 1
    assert hand.called == ["decode" if M <= 16 else "dequantize"]


MOST_DECODED = {  # tokens of small layers, by width, rows of a group and whether each has a zero point
    (4, 128, False): 40, (4, 128, True): 24, (4, 64, False): 16, (4, 64, True): 16, (4, 32, False): 24,
    (4, 32, True): 24, (8, 128, False): 24, (8, 128, True): 24, (8, 64, False): 8, (8, 64, True): 8,
    (8, 32, False): 8, (8, 32, True): 8,
}  # fmt: skip


@CHIPS
@BITS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("M", [1, 8, 9, 16, 17, 24, 25, 40, 41, 128, 257])
def test_a_layer_in_strips_is_multiplied(hand: Hand, shape: dict, bits: int, M: int) -> None:
    weight = layer(**shape, bits=bits, dtype=torch.float16, layout="strips")

    assert_sums_exactly(lambda x: linear(x, weight), weight, torch.float16, M=M)

    config = weight.config
    kind = bits, 128 if config.group_size == -1 else config.group_size, "qzeros" in weight.fields()
    on_hopper = hand.capability == HOPPER
    most = MOST_DECODED[kind] if on_hopper else 48 if kind == (4, 128, False) else 24
    assert hand.called == ["decode" if most >= M else "many" if on_hopper else "mma"]


@pytest.mark.parametrize("chip", [HOPPER])
@DTYPES
@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize(("M", "name"), [(1, "decode"), (24, "decode"), (100, "many")])
def test_two_and_three_bits_take_the_kernels_of_four(
    hand: Hand, bits: int, zeros: bool, act_order: bool, M: int, name: str, dtype: torch.dtype
) -> None:
    weight = layer(256, 96, 128, bits, dtype, "strips", zeros, act_order)

    assert_sums_exactly(lambda x: linear(x, weight), weight, dtype, M=M)

    assert hand.called == [name]


@CHIPS
@DTYPES
@pytest.mark.parametrize("shape", [(256, 128), (192, 72), (384, 200)], ids=["whole", "padded", "ragged"])
@pytest.mark.parametrize(
    "kind", ["tensor", "channel", "e5m2", "block", "int8", "mxfp8", "nvfp4", "mxfp4", "nf4", "fp4"]
)
@pytest.mark.parametrize("M", [1, 24, 25, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_bytes_in_strips_are_multiplied_by_activations_of_any_dtype(
    hand: Hand, shape: tuple[int, int], kind: str, dtype: torch.dtype, M: int, biased: bool
) -> None:
    weight = byte_layer(*shape, kind)
    bias = torch.arange(weight.layer.N).to(dtype) / 8 if biased else None

    assert OPERATORS[type(weight)].why_not_on(weight, dtype, hand.capability) is None
    x, _ = exact_sums(weight, dtype, M)
    want = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    assert torch.equal(linear(x, weight, bias), want.to(dtype))

    assert hand.called == ["decode" if M <= 24 else "many" if hand.capability == HOPPER else "mma"]


@pytest.mark.parametrize(("chip", "kernel"), [(HOPPER, "many"), (HOPPER, "mma"), (AMPERE, "mma")])
@DTYPES
@BITS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("M", [17, 64, 65, 256])
def test_17_tokens_and_more_are_multiplied_with_strips(
    hand: Hand, kernel: str, shape: dict, bits: int, dtype: torch.dtype, M: int
) -> None:
    weight = layer(**shape, bits=bits, dtype=dtype, layout="strips")

    assert_sums_exactly(lambda x: linear(x, weight, kernel=kernel), weight, dtype, M=M)

    assert hand.called == [kernel]


@CHIPS
def test_strips_are_multiplied_elsewhere_without_hoppers_instructions(hand: Hand) -> None:
    weight = layer(128, 64, 128, 4, torch.float16, layout="strips")
    hand.hopper = False

    with pytest.raises(NoKernelError, match=r"QLOAD_CUDA_ARCHS=90a|capability 9\.0"):
        linear(torch.ones(49, 128).half(), weight, kernel="many")
    linear(torch.ones(49, 128).half(), weight)

    assert hand.called == ["dequantize" if hand.capability == HOPPER else "mma"]


@CHIPS
@DTYPES
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "act order"])
@pytest.mark.parametrize(("kernel", "M"), [("few", 1), ("few", 64), ("large", 1), ("large", 65)])
def test_a_layer_in_exllamas_order_is_multiplied(
    hand: Hand, kernel: str, M: int, bits: int, dtype: torch.dtype, act_order: bool
) -> None:
    weight = layer(96, 64, 48, bits, dtype, "exllama", zeros=True, act_order=act_order)

    assert_sums_exactly(lambda x: linear(x, weight, kernel=kernel), weight, dtype, M=M)

    assert hand.gathered == [M] * (act_order and (M > 1 or kernel == "large"))


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_columns_in_exllamas_order_are_rounded_slice_by_slice(hand: Hand, bits: int, biased: bool) -> None:
    weight = layer(96, 2080, 48, bits, torch.float16, "exllama", zeros=True, act_order=True)
    x = torch.randint(-2, 3, (65, 96), generator=torch.Generator().manual_seed(bits)).half()
    bias = torch.arange(2080).half() % 7 if biased else None
    call = exllama.ExllamaCall(*exllama.arguments(x, weight, bias))

    y = exllama.large(call, 1)

    wide = x.double() @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    assert torch.equal(y.double(), wide.half().double())
    assert len(hand.called) > 1


@CHIPS
@pytest.mark.parametrize("layout", ["marlin", "strips"])
@pytest.mark.parametrize("M", [1, 16])
def test_inputs_are_put_in_order_once_ahead_of_the_kernel(hand: Hand, layout: str, M: int) -> None:
    for act_order in (False, True):
        weight = layer(256, 64, 64, 4, torch.float16, layout, act_order=act_order)

        linear(torch.ones(M, 256).half(), weight)

        assert hand.gathered == [M] * act_order


def test_an_index_between_two_loads_is_moved_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    hand, memory = Hand(HOPPER), torch.empty(65, dtype=torch.int32)
    monkeypatch.setattr(launch, "native", lambda: hand)
    monkeypatch.setattr(launch, "stream", lambda x: STREAM)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    perm = memory[1:].copy_(torch.randperm(64))
    x = torch.randn(2, 64).half()

    assert torch.equal(launch.gathered(x, perm), x[:, perm.long()])


@CHIPS
@pytest.mark.parametrize(
    ("layout", "kernel"),
    [("marlin", "decode"), ("marlin", "large"), ("strips", "decode"), ("strips", "mma"), ("strips", "large")],
)
def test_a_kernel_can_be_asked_for_and_adds_a_bias(hand: Hand, layout: str, kernel: str) -> None:
    weight = layer(256, 72, 128, 4, torch.float16, layout)
    bias = torch.arange(72).half()
    x = torch.ones(16, 2, 256).half()[:, 1]

    y = linear(x, weight, bias, kernel=kernel)

    torch.testing.assert_close(y, (x.double() @ weight.dequantize().double().T + bias.double()).half())


@CHIPS
@pytest.mark.parametrize("layout", ["marlin", "strips", "exllama"])
def test_no_tokens_call_nothing(hand: Hand, layout: str) -> None:
    weight = layer(128, 64, 32, 4, torch.float16, layout)

    assert linear(torch.empty(3, 0, 128).half(), weight).shape == (3, 0, 64)
    assert not hand.called


@CHIPS
@pytest.mark.parametrize("M", [1, 17, 100])
def test_inputs_may_start_at_any_address(hand: Hand, M: int) -> None:
    weight = layer(256, 64, 128, 4, torch.float16)
    x = torch.ones(M * 256 + 1).half()[1:].view(M, 256)

    torch.testing.assert_close(linear(x, weight), (x.double() @ weight.dequantize().double().T).half())


@pytest.mark.parametrize("chip", [HOPPER])
@BITS
@pytest.mark.parametrize("layout", ["marlin", "strips"])
def test_a_rounded_weight_is_there_in_slices(
    hand: Hand, layout: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = layer(256, 2120, 64, bits, torch.float16, layout, zeros=True)
    monkeypatch.setattr(products, "CPU_SLICE_BYTES", 1 << 19)  # of a CPU, where this weight lies
    bias = torch.arange(2120).half()

    assert_sums_exactly(lambda x: linear(x, weight, kernel="large"), weight, torch.float16, M=33)
    got = linear(torch.zeros(1, 256).half(), weight, bias, kernel="large")

    assert hand.called == ["dequantize"] * 6  # of 1024, 1024 and 72 columns
    assert torch.equal(got[0], bias)


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize(
    ("bits", "M", "called"),
    [(3, 64, ["exllama"]), (3, 65, ["rounded_three"]), (4, 64, ["exllama"]), (4, 65, ["dequantize"])],
)
def test_more_tokens_are_multiplied_with_rounded_weights(
    hand: Hand, bits: int, M: int, called: list[str]
) -> None:
    weight = layer(96, 64, 48, bits, torch.float16, "exllama", zeros=True)

    assert_sums_exactly(lambda x: linear(x, weight), weight, torch.float16, M=M)

    assert hand.called == called


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("layout", ["marlin", "strips", "exllama"])
def test_a_kernel_starts_early_where_it_may(hand: Hand, layout: str, early: bool) -> None:
    weight = layer(256, 64, 128, 4, torch.float16, layout)

    linear(torch.ones(1, 256).half(), weight, early=early)

    assert hand.early == early


def test_a_compiled_model_asks_for_the_module_as_it_is_traced() -> None:
    torch._dynamo.reset()
    asked = torch.compile(lambda x: x if module.why_not() else x * 2, fullgraph=True, backend="eager")

    assert torch.equal(asked(torch.ones(2)), torch.ones(2) if module.why_not() else torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("chip", "M", "called"),
    [(HOPPER, 16, ["decode"]), (HOPPER, 17, []), (AMPERE, 1, ["decode"])],  # [] for torch
)
@BITS
@pytest.mark.parametrize("K", [128, 96], ids=["whole", "padded"])
def test_the_group_of_each_row_is_looked_up_where_groups_have_rows_elsewhere(
    hand: Hand, M: int, called: list[str], bits: int, K: int
) -> None:
    weight = layer(K, 64, 32, bits, torch.float16, zeros=True, act_order=True, share=2)
    assert not weight.config.is_k_full

    assert_sums_exactly(lambda x: linear(x, weight), weight, torch.float16, M=M)

    assert hand.called == called


@pytest.mark.parametrize("chip", [HOPPER])
@pytest.mark.parametrize("kernel", ["few", "large"])
def test_groups_of_several_sizes_are_looked_up(hand: Hand, kernel: str) -> None:
    weight = layer(96, 64, 48, 4, torch.float16, "exllama", zeros=True)
    index = torch.arange(96, dtype=torch.int32).ge(32).to(torch.int32)
    uneven = replace(weight, g_idx=index, layer=replace(weight.layer, parts=()))
    assert (weight.config.run, uneven.config.run) == (48, 0)

    assert_sums_exactly(lambda x: linear(x, uneven, kernel=kernel), uneven, torch.float16, M=9)
