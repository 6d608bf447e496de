"""Diagnosis of `--against`: the cause of a difference, for known mistakes of programs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import GPTQConfig, GPTQWeight, UnquantizedWeight, open_checkpoint
from qload.verify import verify
from qload.verify.diagnose_diff import misreadings
from tests.verify import checkpoints

pytestmark = pytest.mark.usefixtures("seen_texts")

BITS = {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}
GPTQ = {"quant_method": "gptq", **BITS}
AWQ = {"quant_method": "awq", "zero_point": True, "version": "gemm", **BITS}
N = K = 64
GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
OTHER = "model.layers.1.mlp.up_proj"
LAYERS = (GATE, UP, "model.layers.1.mlp.gate_proj", OTHER)
Tensors = dict[str, Tensor]


def model(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir()
    return checkpoints.model(folder, {name: tensor.clone() for name, tensor in tensors.items()}, **config)


def words(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=random, dtype=torch.int32)


def drawn(method: str) -> Tensors:
    """Return layers of random codes and zero points, with different scales of one magnitude."""
    random, tensors = torch.Generator().manual_seed(1), {}
    for prefix in LAYERS:
        tensors[f"{prefix}.qweight"] = words(random, *((K // 8, N) if method == "gptq" else (K, N // 8)))
        tensors[f"{prefix}.qzeros"] = words(random, K // 32, N // 8) & 0x77777777  # no carries
        tensors[f"{prefix}.scales"] = 0.01 + 0.01 * torch.rand(K // 32, N, generator=random).half()
        if method == "gptq":
            tensors[f"{prefix}.g_idx"] = torch.arange(K, dtype=torch.int32) // 32
    return tensors


def nibbles(tensor: Tensor, order: list[int]) -> Tensor:
    codes = torch.stack([tensor.to(torch.int64) >> 4 * place & 15 for place in range(8)])
    made = sum(codes[taken] << 4 * place for place, taken in enumerate(order))
    assert isinstance(made, Tensor)
    return torch.where(made >= 2**31, made - 2**32, made).to(torch.int32)


def gate_for_up(tensors: Tensors) -> None:
    for name in ("qweight", "qzeros", "scales"):
        one, other = f"{GATE}.{name}", f"{UP}.{name}"
        tensors[one], tensors[other] = tensors[other], tensors[one]


def other_block(tensors: Tensors) -> None:
    for name in ("qweight", "qzeros", "scales"):
        tensors[f"{UP}.{name}"] = tensors[f"{OTHER}.{name}"]


def big_endian(tensors: Tensors) -> None:
    for name in ("qweight", "qzeros"):
        tensors[f"{UP}.{name}"] = (
            tensors[f"{UP}.{name}"]
            .view(torch.uint8)
            .reshape(-1, 4)
            .flip(1)
            .reshape(*tensors[f"{UP}.{name}"].shape[:-1], -1)
            .contiguous()
            .view(torch.int32)
        )


def awq_order(tensors: Tensors) -> None:
    for name in ("qweight", "qzeros"):
        tensors[f"{UP}.{name}"] = nibbles(tensors[f"{UP}.{name}"], [0, 2, 4, 6, 1, 3, 5, 7])


def awq_order_of_codes(tensors: Tensors) -> None:
    tensors[f"{UP}.qweight"] = nibbles(tensors[f"{UP}.qweight"], [0, 2, 4, 6, 1, 3, 5, 7])


def swapped(tensors: Tensors) -> None:
    tensors[f"{UP}.qweight"] = nibbles(tensors[f"{UP}.qweight"], [1, 0, 3, 2, 5, 4, 7, 6])


def words_rolled(tensors: Tensors) -> None:
    tensors[f"{UP}.qweight"] = tensors[f"{UP}.qweight"].roll(1, 0)


def columns_rolled(tensors: Tensors) -> None:
    for name in ("qweight", "scales"):
        tensors[f"{UP}.{name}"] = tensors[f"{UP}.{name}"].roll(1, 1)
    zeros = torch.stack([tensors[f"{UP}.qzeros"].to(torch.int64) >> 4 * place & 15 for place in range(8)], -1)
    rolled = zeros.flatten(1).roll(1, 1).reshape(zeros.shape)
    made = sum(rolled[..., place] << 4 * place for place in range(8))
    assert isinstance(made, Tensor)
    tensors[f"{UP}.qzeros"] = torch.where(made >= 2**31, made - 2**32, made).to(torch.int32)


def scales_of_another(tensors: Tensors) -> None:
    tensors[f"{UP}.scales"] = tensors[f"{GATE}.scales"]


def zeros_of_another(tensors: Tensors) -> None:
    tensors[f"{UP}.qzeros"] = tensors[f"{GATE}.qzeros"]


def groups_of_another(tensors: Tensors) -> None:
    tensors[f"{UP}.g_idx"] = tensors[f"{UP}.g_idx"].roll(5)


Damage = Callable[[Tensors], None]
CASES: list[tuple[str, Damage, str]] = [
    ("gptq", gate_for_up, f"it is the reference's {GATE}"),
    ("awq", gate_for_up, f"it is the reference's {GATE}"),
    ("gptq", other_block, f"it is the reference's {OTHER}"),
    ("gptq", big_endian, "read with bytes of a word reversed (big-endian) along K and in zero points"),
    ("awq", big_endian, "read with bytes of a word reversed (big-endian) along N and in zero points"),
    ("gptq", awq_order, "read with even codes first undone along K and in zero points"),
    ("gptq", awq_order_of_codes, "read with even codes first undone along K"),
    ("awq", swapped, "read with codes of a byte swapped along N"),
    ("gptq", swapped, "read with codes of a byte swapped along K"),
    ("gptq", words_rolled, "read with codes 8 back along K"),
    ("gptq", columns_rolled, "read with outputs one back"),
    ("gptq", scales_of_another, "read with the reference's scales"),
    ("awq", zeros_of_another, "read with the reference's zero points"),
    ("gptq", groups_of_another, "read with the reference's groups (g_idx)"),
]


@pytest.mark.parametrize(("method", "damage", "named"), CASES)
def test_the_mistake_is_named_beside_a_quantized_and_a_plain_reference(
    method: str, damage: Damage, named: str, tmp_path: Path
) -> None:
    sound, broken, dense = (tmp_path / name for name in ("sound", "broken", "dense"))
    config = {"gptq": GPTQ, "awq": AWQ}[method]
    tensors = drawn(method)
    model(sound, tensors, quantization_config=config)
    with open_checkpoint(sound) as weights:
        plain = {f"{name}.weight": weights.get_weights(name).dequantize() for name in LAYERS}
    model(dense, plain)
    damage(tensors)
    model(broken, tensors, quantization_config=config)

    quantized = {one.tensor: one.message for one in verify(broken, against=sound).findings}
    report = verify(broken, against=dense)
    beside_plain = {one.tensor: one.message for one in report.findings}

    assert f"{named}, it agrees" in quantized[UP] or quantized[UP].endswith(named)
    if "read with the reference's" not in named:
        assert named in beside_plain[UP]
    elif "scales" in named:  # as close as the result of another quantizer
        assert any(note.startswith(f"{UP}: relative error") for note in report.notes)
    else:
        assert "differs from the reference" in beside_plain[UP]


def reversed_codes(tensors: Tensors) -> None:
    tensors[f"{UP}.qweight"] = nibbles(tensors[f"{UP}.qweight"], [7, 6, 5, 4, 3, 2, 1, 0])


def test_a_fault_that_no_reading_takes_back_is_named_by_its_class(tmp_path: Path) -> None:
    tensors = drawn("gptq")
    sound = model(tmp_path / "sound", tensors, quantization_config=GPTQ)
    reversed_codes(tensors)
    broken = model(tmp_path / "broken", tensors, quantization_config=GPTQ)

    found = {one.tensor: one.message for one in verify(broken, against=sound).findings}

    assert "\ncodes of a word reversed along K: explains 100 % of " in found[UP]


def quantized(original: Tensor, group: int = 32) -> Tensors:
    """Quantize a weight (N, K) to the nearest symmetric codes of 4 bits, in the words of GPTQ."""
    grouped = original.reshape(N, K // group, group)
    scales = (grouped.abs().amax(2) / 7).half()
    codes = (grouped / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int64) + 8
    packed = codes.reshape(N, K // 8, 8)
    made = sum(packed[..., place] << 4 * place for place in range(8))
    assert isinstance(made, Tensor)
    words = torch.where(made >= 2**31, made - 2**32, made).to(torch.int32)
    return {
        "qweight": words.T.contiguous(),
        "qzeros": torch.full((K // group, N // 8), 0x77777777, dtype=torch.int32),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(K, dtype=torch.int32) // group,
    }


def originals() -> Tensors:
    random = torch.Generator().manual_seed(2)
    return {f"{name}.weight": torch.randn(N, K, generator=random) for name in LAYERS}


def rounded(tensors: Tensors) -> Tensors:
    return {
        f"{name.removesuffix('.weight')}.{suffix}": tensor
        for name, original in tensors.items()
        for suffix, tensor in quantized(original).items()
    }


def a_wrong_word(tensors: Tensors) -> None:
    tensors[f"{UP}.qweight"][3, 5] ^= 0x55555555


def transposed(tensors: Tensors) -> None:
    weight = originals()[f"{UP}.weight"]
    tensors |= {f"{UP}.{name}": tensor for name, tensor in quantized(weight.T.contiguous()).items()}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (a_wrong_word, "a word at (n, k) = (5, 24) is off by"),
        (transposed, "it is the reference transposed"),
        (gate_for_up, f"it is the reference's {GATE}"),
        (other_block, f"it is the reference's {OTHER}"),
        (swapped, "read with codes of a byte swapped along K, it comes closer"),
        (big_endian, "read with bytes of a word reversed (big-endian) along K, it comes closer"),
    ],
)
def test_the_mistake_is_named_beside_the_float_original(damage: Damage, named: str, tmp_path: Path) -> None:
    config = {**GPTQ, "sym": True}
    original = model(tmp_path / "original", originals())
    sound = model(tmp_path / "sound", rounded(originals()), quantization_config=config)
    tensors = rounded(originals())
    damage(tensors)
    broken = model(tmp_path / "broken", tensors, quantization_config=config)

    kept, found = verify(sound, against=original), verify(broken, against=original)

    assert kept.findings == ()
    assert sum("relative error" in note for note in kept.notes) == len(LAYERS)
    assert named in next(one.message for one in found.findings if one.tensor == UP)


def test_a_group_of_zeros_with_no_step_is_not_taken_for_an_outlier(tmp_path: Path) -> None:
    weights = originals()
    weights[f"{UP}.weight"][5, :32] = 0
    tensors = rounded(weights)
    tensors[f"{UP}.qweight"][:4, 5] = -0x77777778  # 8 in each place: zero
    assert not tensors[f"{UP}.scales"][0, 5]

    report = verify(
        model(tmp_path / "mine", tensors, quantization_config={**GPTQ, "sym": True}),
        against=model(tmp_path / "original", weights),
    )

    assert report.findings == ()


def test_a_transposed_square_is_named_beside_the_same_quantized(tmp_path: Path) -> None:
    original = model(tmp_path / "original", originals())
    turned = {**originals(), f"{UP}.weight": originals()[f"{UP}.weight"].T.contiguous()}

    (found,) = verify(model(tmp_path / "broken", turned), against=original).findings

    assert found.message.endswith("it is the reference transposed")


def test_a_reference_that_is_no_number_names_no_other_layer(tmp_path: Path) -> None:
    damaged = originals()
    damaged[f"{UP}.weight"][3, 5] = torch.nan
    reference = model(tmp_path / "reference", damaged)

    report = verify(model(tmp_path / "mine", originals()), against=reference)

    (found,) = (one for one in report.findings if one.tensor == UP)
    assert "differs from the reference first at (n, k) = (3, 5)" in found.message
    assert "it is the reference" not in found.message


def test_of_one_output_nobody_says_that_it_is_one_too_far() -> None:
    one, two = (UnquantizedWeight(weight=torch.full((rows, 4), 2.0)) for rows in (1, 2))

    assert misreadings(one, one) == {}
    assert set(misreadings(two, two)) == {"outputs one back", "outputs one on"}


def test_what_the_reference_has_too_is_not_exchanged() -> None:
    held = {name.rpartition(".")[2]: tensor for name, tensor in drawn("gptq").items() if UP in name}
    weight = GPTQWeight(config=GPTQConfig(4, 32), **held)
    other = replace(weight, scales=weight.scales * 2)

    assert not [mistake for mistake in misreadings(weight, weight) if mistake.startswith("the reference's")]
    assert "the reference's scales" in misreadings(weight, other)


@pytest.mark.parametrize(("step", "named"), [(1, "after"), (-1, "before")])
def test_scales_of_the_group_before_are_not_those_of_the_group_after(step: int, named: str) -> None:
    random = torch.Generator().manual_seed(3)
    scales = 0.01 + 0.01 * torch.rand(3, 8, generator=random).half()
    weight = GPTQWeight(
        config=GPTQConfig(4, 32),
        qweight=words(random, 12, 8),
        qzeros=torch.full((3, 1), 0x77777777, dtype=torch.int32),
        scales=scales,
        g_idx=torch.arange(96, dtype=torch.int32) // 32,
    )

    read = misreadings(replace(weight, scales=scales.roll(step, 0)), weight)
    same = [mistake for mistake, made in read.items() if torch.equal(*made())]

    assert same == [f"scales of the group {named}", "the reference's scales"]
