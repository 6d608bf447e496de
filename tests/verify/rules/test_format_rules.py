"""Where the rules about claims, biases, codes and scales have to speak, and where to keep quiet."""

from pathlib import Path

import pytest
import torch

from qload.verify import inspect, verify
from tests.paths import FIXTURES, cases
from tests.verify.checkpoints import GPTQ, gptq, model, plain, rules
from tests.verify.damage import read_tensors, write_case
from tests.verify.format_damage import nibbles_swapped, zeros

pytestmark = pytest.mark.usefixtures("seen_texts")


def test_a_shard_on_its_own_need_not_hold_what_the_config_claims(tmp_path: Path) -> None:
    model(tmp_path, plain("model.norm.weight"), quantization_config=GPTQ)
    shard = tmp_path / "model.safetensors"
    assert rules(inspect(shard)) == rules(verify(shard)) == {"claimed-method"}

    (tmp_path / "model.safetensors.index.json").write_text("{}")

    assert verify(shard).verdict == inspect(shard).verdict == "ok"


def test_a_layer_that_is_wrong_is_not_reported_as_lost_too(tmp_path: Path) -> None:
    tensors = gptq("a")
    del tensors["a.scales"]

    assert rules(verify(model(tmp_path, tensors, quantization_config=GPTQ))) == {"missing-tensor"}


def test_a_tensor_under_another_belongs_to_its_layer(tmp_path: Path) -> None:
    tensors = {**gptq("a"), "a.qweight.old": torch.ones(1)}

    (finding,) = verify(model(tmp_path, tensors, quantization_config=GPTQ)).findings

    assert (finding.rule, finding.tensor) == ("unexplained-tensor", "a.qweight.old")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_bias_of_any_float_is_sound(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {**gptq("a"), "a.bias": torch.ones(8, dtype=dtype)}

    assert verify(model(tmp_path, tensors, quantization_config=GPTQ)).findings == ()


def test_scales_of_zero_are_sound_where_the_layer_is_zero(tmp_path: Path) -> None:
    tensors = gptq("a")
    tensors["a.scales"].zero_()
    assert verify(model(tmp_path, tensors, quantization_config=GPTQ)).findings == ()

    tensors["a.qweight"][1, 3] = 1

    assert rules(verify(model(tmp_path, tensors, quantization_config=GPTQ))) == {"scale-value"}


@pytest.mark.parametrize(
    ("case", "codes", "scales"),
    [
        ("bnb/fp4_nested_ragged_60x100", ".absmax", "nested_absmax"),
        ("compressed_tensors/mxfp4", "weight_packed", "weight_scale"),
    ],
    ids=["scales of scales", "exponents"],
)
def test_scales_that_say_nothing_are_sound_over_codes_that_are_alike(
    case: str, codes: str, scales: str, tmp_path: Path
) -> None:
    damaged = read_tensors(FIXTURES / case)
    zeros(scales)(damaged)
    assert rules(verify(write_case(damaged, tmp_path / "differing"))) == {"scale-value"}

    zeros(codes)(damaged)

    assert rules(verify(write_case(damaged, tmp_path / "alike"))) == set()


def test_codes_of_four_bits_in_bytes_need_no_fifth(tmp_path: Path) -> None:
    scheme = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": scheme}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    tensors = {
        "a.weight": torch.tensor([[-8, 7], [0, 1]], dtype=torch.int8),
        "a.weight_scale": torch.ones(2, 1),
    }
    assert verify(model(tmp_path, tensors, quantization_config=config)).findings == ()

    tensors["a.weight"][1, 0] = 8

    (finding,) = verify(model(tmp_path, tensors, quantization_config=config)).findings
    assert finding.rule == "field-value"
    assert finding.message == "a.weight: code 8 at (1, 0), it has to be -8 to 7; 1 in all"


def test_units_that_fp16_rounds_hard_are_told_and_lawful() -> None:
    counts = [[note for note in verify(folder).notes if "subnormal" in note] for folder in cases("exl2")]

    assert [len(notes) for notes in counts] == [0, 0, 1]
    assert "1 of 13 units are subnormal in fp16" in counts[2][0]


def test_experts_are_compared_expert_by_expert(tmp_path: Path) -> None:
    (folder,) = cases("mxfp4")
    case = read_tensors(folder)
    name = next(name for name in case.tensors if name.endswith("_blocks"))
    case.tensors[name][1, 5, 1, 15] ^= 0x10

    (finding,) = verify(write_case(case, tmp_path / "broken"), against=folder).findings

    assert finding.rule == "against-value"
    assert "first at (e, n, k) = (1, 5, 63)" in finding.message


def test_swapped_codes_of_a_byte_are_named(tmp_path: Path) -> None:
    folder = FIXTURES / "compressed_tensors" / "nvfp4"
    case = read_tensors(folder)
    nibbles_swapped("weight_packed")(case)

    (finding,) = verify(write_case(case, tmp_path / "broken"), against=folder).findings

    assert finding.message.endswith("read with codes of a byte swapped along K, it agrees")


@pytest.mark.parametrize("size", [16, 1 << 40, 10**30])
def test_a_group_larger_than_the_layer_is_one_group_however_large(size: int, tmp_path: Path) -> None:
    tensors = gptq("a")
    one = {"qzeros": tensors["a.qzeros"][:1], "scales": tensors["a.scales"][:1]}
    tensors |= {f"a.{name}": tensor.clone() for name, tensor in one.items()}
    tensors["a.g_idx"] = torch.zeros(16, dtype=torch.int32)

    folder = model(tmp_path, tensors, quantization_config={**GPTQ, "group_size": size})

    assert verify(folder, against=folder).findings == ()
