"""Restore of details that only the checkpoint's layout stores; one large group; short words."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import RepackError
from qload.formats import CTPackConfig, CTPackWeight, GPTQWeight, MarlinConfig, MarlinWeight
from qload.kernel_formats import GPTQMarlinWeight, repack, restore
from qload.layouts import compressed_tensors
from qload.loader import ConfiguredFormat, FormatLoader
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits, emulators
from qload.weights import Weights
from tests.kernel_formats.marlin_layers import layer

pytestmark = pytest.mark.usefixtures("seen_texts")


def assert_restored(weight: Any, *layouts: str) -> None:
    """Repack to each of the layouts in turn, and compare the restored weight tensor by tensor."""
    packed: Weight = weight
    for layout in layouts:
        packed = repack(packed, layout)
    restored = restore(packed)
    assert (type(restored), restored.config, restored.layer) == (type(weight), weight.config, weight.layer)
    assert restored.fields().keys() == weight.fields().keys()
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)


@pytest.mark.parametrize("index", [torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("layouts", [("awq",), ("marlin",), ("exllama",), ("awq", "marlin", "gptq")])
def test_the_dtype_of_a_group_index_is_restored(index: torch.dtype, layouts: tuple[str, ...]) -> None:
    assert_restored(layer(128, 64, 32, index=index), *layouts)


KERNEL_LAYOUTS = ("marlin", "strips", "panels", "exllama")


@pytest.mark.parametrize("first", KERNEL_LAYOUTS)
@pytest.mark.parametrize("second", KERNEL_LAYOUTS)
def test_a_repacked_weight_is_repacked_to_another_layout(first: str, second: str) -> None:
    weight = layer(128, 64, 32)

    packed, wanted = repack(repack(weight, first), second), repack(weight, second)

    assert type(packed) is type(wanted)
    for name, tensor in wanted.fields().items():
        assert_same_bits(packed.fields()[name], tensor)


def sparse(K: int, group: int, index: torch.dtype = torch.int32) -> GPTQWeight:
    weight = layer(K, 64, group, index=index)
    weight.qweight.fill_(-0x66776678)  # 0x99889988
    return weight


@pytest.mark.parametrize("index", [torch.int16, torch.int64], ids=str)
def test_the_dtype_of_a_group_index_is_restored_from_2_of_4(index: torch.dtype) -> None:
    assert_restored(sparse(128, 32, index), "marlin_24")


@pytest.mark.parametrize("layout", ["awq", "marlin", "marlin_24", "exllama"])
@pytest.mark.parametrize("group", [64, 128, 256])
def test_a_group_larger_than_the_layer_is_one_group(layout: str, group: int) -> None:
    weight = sparse(64, group)

    assert_same_bits(repack(weight, layout).dequantize(), weight.dequantize())
    assert_restored(weight, layout)


def test_a_marlin_checkpoint_of_one_large_group_is_restored() -> None:
    words = torch.arange(4 * 128, dtype=torch.int32).reshape(4, 128)
    weight = MarlinWeight(config=MarlinConfig(64), B=words, s=torch.ones(1, 64).half())

    assert_restored(weight, "exllama", "gptq")


def short_awq(K: int = 12) -> Weight:
    config = {"quant_method": "awq", "bits": 4, "group_size": -1}
    tensors = {
        "a.qweight": torch.arange(K, dtype=torch.int32)[:, None] * 0x01234567,
        "a.qzeros": torch.full((1, 1), 0x7654321, dtype=torch.int32),
        "a.scales": torch.arange(1, 9)[None].half(),
    }
    return Weights(MemoryStorage(tensors), loader=loader_from_config(config)).get_weights("a")


def test_awq_with_short_words_is_padded_for_marlin_and_restored() -> None:
    weight = short_awq()

    packed = repack(weight, "marlin")

    assert isinstance(packed, GPTQMarlinWeight)
    assert_same_bits(packed.dequantize(), weight.dequantize())
    read = emulators.marlin_weight(**packed.fields(), bits=4, is_k_full=True)
    assert torch.equal(read[:12, :8], weight.dequantize().T)
    assert not read[12:].any()
    assert_restored(weight, "marlin")


def ct(
    bits: int = 4, N: int = 64, K: int = 128, group: int = 32, *, symmetric: bool = True,
    zeros: bool = False, index: torch.dtype | None = None, dense: bool = True,
) -> CTPackWeight:  # fmt: skip
    """Build a compressed-tensors layer of counting codes, with symmetric zero points."""
    groups = -(-K // group)
    config = CTPackConfig(bits, group, symmetric, dense=dense)
    fields: dict[str, Tensor] = {
        "weight_packed": compressed_tensors.pack(
            (torch.arange(N * K) % 2**bits).reshape(N, K).int(), bits, dense
        ),
        "weight_scale": (torch.arange(N * groups) % 32 + 1).reshape(N, groups).bfloat16(),
        "weight_shape": torch.tensor([N, K]),
    }
    if zeros:
        points = torch.full((groups, N), 2 ** (bits - 1), dtype=torch.int32)
        fields["weight_zero_point"] = compressed_tensors.pack(points, bits, dense).T.contiguous()
    if index is not None:
        fields["weight_g_idx"] = (torch.arange(K) // group).to(index)
    stored = {f"a.{name}": tensor for name, tensor in fields.items()}
    loader = FormatLoader(ConfiguredFormat(CTPackWeight, config))
    weight = Weights(MemoryStorage(stored), loader=loader).get_weights("a")
    assert isinstance(weight, CTPackWeight)
    return weight


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "exllama", "marlin", "awq"])
@pytest.mark.parametrize(
    "stored",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"zeros": True}, id="zero points that the config denies"),
        pytest.param({"zeros": True, "symmetric": False}, id="zero points"),
        pytest.param({"index": torch.int64}, id="an index of int64"),
        pytest.param({"index": torch.int32, "zeros": True}, id="an index and zero points"),
        pytest.param({"dense": False}, id="by words"),
    ],
)
def test_a_compressed_layer_is_restored_with_its_tensors(
    bits: int, layout: str, stored: dict[str, Any]
) -> None:
    weight = ct(bits, **stored)
    if layout in ("marlin", "awq") and bits < 4:
        with pytest.raises(RepackError, match=rf"4 or 8 bits, got {bits}"):
            repack(weight, layout)
        return

    assert_same_bits(repack(weight, layout).dequantize(), weight.dequantize())
    assert_restored(weight, layout)


def test_codes_of_3_bits_are_repacked_from_words_of_ten_to_a_stream_and_back() -> None:
    weight = ct(3, K=160, dense=False)

    assert_same_bits(repack(weight, "gptq").dequantize(), weight.dequantize())
    assert_restored(weight, "gptq")


@pytest.mark.parametrize("zeros", [False, True])
def test_a_layer_with_stored_zero_points_is_not_symmetric(zeros: bool) -> None:
    weight = ct(zeros=zeros)

    packed = repack(weight, "marlin")

    assert weight.config.symmetric == (not zeros)
    assert ("qzeros" in packed.fields()) == zeros


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_widths_beyond_other_layouts_are_refused_with_the_reason(bits: int) -> None:
    with pytest.raises(RepackError, match=f"reason   other layouts have 2, 3, 4 or 8 bits, got {bits}"):
        repack(ct(bits), "gptq")


def test_nonzero_unused_bits_are_refused() -> None:
    weight = ct(K=100, group=100)
    assert_restored(weight, "marlin")
    weight.weight_packed[3, -1] |= 1 << 30

    with pytest.raises(RepackError, match=r"a to other layouts(.|\n)*unused bits of a word are not 0"):
        repack(weight, "marlin")


def test_inputs_with_short_words_are_padded_for_marlin_and_else_refused() -> None:
    weight = ct(K=100, group=100)

    assert_same_bits(repack(weight, "marlin").dequantize(), weight.dequantize())
    for layout in ("gptq", "exllama"):
        with pytest.raises(RepackError, match="K = 100 is not a multiple of 8: short words"):
            repack(weight, layout)
