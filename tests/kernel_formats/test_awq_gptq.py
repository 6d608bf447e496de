"""AWQ and GPTQ represent the same weights; zero points of 0 survive both conventions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qload.detect import loader_from_config
from qload.errors import RepackError
from qload.formats import AWQWeight, GPTQConfig, GPTQWeight
from qload.kernel_formats import repack, restore
from qload.layouts import Stored, StoredMinusOneUnmasked
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.paths import cases

pytestmark = pytest.mark.usefixtures("seen_texts")

LAYERS = [folder for folder in cases("awq") if (folder / "model.safetensors").is_file()]


@pytest.mark.parametrize("folder", LAYERS, ids=lambda folder: folder.name)
def test_awq_as_gptq_has_the_words_of_other_converters(folder: Path) -> None:
    """autoawq subtracts 1 from whole words of zero points, like a writer of gptq v1."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    storage = MemoryStorage(load_file(folder / "model.safetensors"))
    owner = load_file(folder / "expected" / "expected.safetensors")
    prefix = next(iter(storage.keys())).rpartition(".")[0]
    weight = Weights(storage, loader=loader_from_config(config)).get_weights(prefix)

    packed = repack(weight, "gptq")

    assert_same_bits(packed.fields()["qzeros"], owner["repacked.exllama_gptq_v1.qzeros_autoawq_wordborrow"])
    shuffled = repack(weight, "exllama").fields()["qweight"]
    assert_same_bits(packed.fields()["qweight"], owner["repacked.exllama_gptq_v1.qweight"])
    assert shuffled.shape == packed.fields()["qweight"].shape
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert isinstance(restore(packed), AWQWeight)


def gptq(K: int, groups: int, bits: int = 4) -> GPTQWeight:
    return GPTQWeight(
        config=GPTQConfig(bits, -(-K // groups) if groups > 1 else -1, Stored()),
        qweight=torch.zeros(K * bits // 32, 32, dtype=torch.int32),
        qzeros=torch.full((groups, bits), -1, dtype=torch.int32),
        scales=torch.ones(groups, 32, dtype=torch.float16),
        g_idx=(torch.arange(K) // -(-K // groups)).to(torch.int32),
    )


def with_reversed_index(weight: GPTQWeight) -> GPTQWeight:
    weight.g_idx.copy_(weight.g_idx.flip(0))
    return weight


def unmasked(weight: GPTQWeight) -> GPTQWeight:
    return GPTQWeight(config=GPTQConfig(4, -1, StoredMinusOneUnmasked()), **weight.fields())


@pytest.mark.parametrize(
    ("weight", "layout", "reason"),
    [
        pytest.param(gptq(64, 2, bits=2), "awq", "awq has 4 or 8 bits, got 2", id="bits"),
        pytest.param(gptq(288, 3), "awq", None, id="even groups"),
        pytest.param(gptq(40, 3), "awq", "K = 40 does not divide into groups of 14", id="ragged"),
        pytest.param(
            with_reversed_index(gptq(64, 2)), "awq", r"not in order along K \(act order\)", id="act order"
        ),
        pytest.param(unmasked(gptq(64, 1)), "awq", "a zero point of 16 does not fit 4 bits", id="zero 16"),
        pytest.param(unmasked(gptq(64, 1)), "gptq", "a zero point of 16 is above 15", id="zero 16 as v1"),
    ],
)
def test_an_unsupported_weight_is_refused_with_the_reason(
    weight: GPTQWeight, layout: str, reason: str | None
) -> None:
    if reason is None:
        assert_same_bits(repack(weight, layout).dequantize(), weight.dequantize())
        return

    with pytest.raises(RepackError, match=reason):
        repack(weight, layout)


def test_awq_with_short_words_is_refused_for_gptq() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": -1}
    tensors = {
        "a.qweight": torch.zeros(12, 1, dtype=torch.int32),
        "a.qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "a.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = Weights(MemoryStorage(tensors), loader=loader_from_config(config)).get_weights("a")

    with pytest.raises(RepackError, match="K = 12 is not a multiple of 8"):
        repack(weight, "gptq")
