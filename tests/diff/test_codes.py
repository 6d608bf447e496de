"""Codes beside codes: equal operands are equal bits, and one that differs is never taken for equal."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qload import AWQConfig, AWQWeight, GPTQWeight, convert, diff, open_checkpoint, repack
from qload.conversion.targets import INTEGERS
from qload.diff import CheckpointDiff, LayerDiff, comparison
from qload.diff.comparison import equal_codes, has_packed_codes, output_blocks, same_weight
from qload.formats import UnquantizedConfig, UnquantizedWeight
from qload.spec import Codes, Weight
from qload.testing import make_checkpoint
from qload.verify.comparison import equal_bits

pytestmark = pytest.mark.usefixtures("seen_texts")

MIDDLE = -2004318072  # 0x88888888: eight zero points of 8


def awq() -> AWQWeight:
    """(N, K) = (64, 64), two groups, whose codes all differ from their neighbours."""
    words = torch.arange(64 * 8, dtype=torch.int32).reshape(64, 8) * 0x1234567
    return AWQWeight(
        config=AWQConfig(32),
        qweight=words,
        qzeros=torch.full((2, 8), MIDDLE, dtype=torch.int32),
        scales=torch.arange(1, 129).reshape(2, 64).half(),
    )


def written(to: str) -> Weight:
    return INTEGERS[to].write(awq().to_integers())


@pytest.mark.parametrize("to", ["gptq", "gptq_v2", "awq", "marlin_checkpoint", "compressed-tensors"])
def test_equal_codes_are_told_in_every_order_and_from_both_sides(to: str) -> None:
    one, other = awq(), written(to)

    assert has_packed_codes(one)
    assert has_packed_codes(other)
    assert equal_codes(one, other)
    assert equal_codes(other, one)
    assert torch.equal(one.dequantize(), other.dequantize())


def test_operands_of_another_type_or_shape_are_not_equal() -> None:
    one = awq()
    equal = replace(one, scales=torch.ones(2, 64).half())
    others = [
        replace(equal, config=AWQConfig(64), scales=torch.ones(1, 64).half(), qzeros=one.qzeros[:1]),
        replace(equal, qweight=one.qweight[:32], config=AWQConfig(16)),
    ]

    assert equal_codes(equal, replace(equal))
    assert same_weight(equal, replace(equal))
    assert not same_weight(equal, replace(equal, scales=torch.ones(2, 64).bfloat16()))
    assert not same_weight(equal, UnquantizedWeight(weight=equal.dequantize()))
    for other in others:
        assert not equal_codes(equal, other)
        assert not equal_codes(other, equal)
        assert not same_weight(equal, other)
        assert not same_weight(other, equal)


@pytest.mark.parametrize("to", ["gptq", "marlin_checkpoint", "compressed-tensors"])
@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
def test_one_element_that_differs_is_seen(to: str, name: str) -> None:
    changed = getattr(awq(), name).clone()
    changed[-1, -1] += 1
    one, other = replace(awq(), **{name: changed}), written(to)

    assert not equal_codes(one, other)
    assert not equal_codes(other, one)


def test_groups_that_rows_are_in_count() -> None:
    one = repack(awq(), "gptq")
    assert isinstance(one, GPTQWeight)
    assert one.g_idx is not None
    swapped = one.g_idx.clone()
    swapped[[0, -1]] = swapped[[-1, 0]]

    assert not equal_codes(one, replace(one, g_idx=swapped, config=replace(one.config, positional=False)))


def test_zeros_of_another_sign_are_other_bits() -> None:
    one = replace(awq(), scales=torch.zeros(2, 64).half())

    assert not equal_codes(one, replace(one, scales=-one.scales))


class RoundedOnceMore(AWQWeight):
    """As EXL2 is."""

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        return super().dequantize(torch.float16).to(dtype)


class SpelledOut(AWQWeight):
    """As Marlin 2:4 is."""

    def codes(self) -> Codes:
        return replace(super().codes(), codes=super().codes().plain())


class WithFactors(AWQWeight):
    """As AWQ's own are where they were not folded into the layer before."""

    @property
    def input_factors(self) -> Tensor:
        return torch.ones(64)


@pytest.mark.parametrize("kind", [RoundedOnceMore, SpelledOut, WithFactors])
def test_weights_that_codes_in_words_do_not_tell_are_dequantized(kind: type[AWQWeight]) -> None:
    one = awq()

    assert not has_packed_codes(kind.unchecked(one.config, one.layer, one.fields()))
    assert not has_packed_codes(UnquantizedWeight(config=UnquantizedConfig(), weight=one.dequantize()))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint in two formats, of layers of (64, 64) and more."""
    make_checkpoint("gptq", tmp_path / "gptq", config={"num_hidden_layers": 1})
    convert(tmp_path / "gptq", tmp_path / "awq", to="awq")
    return tmp_path / "gptq", tmp_path / "awq"


def quantized(found: CheckpointDiff) -> dict[str, LayerDiff]:
    return {layer.name: layer for layer in found.layers if layer.name.endswith("_proj")}


def test_nothing_is_dequantized_where_codes_are_equal(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "CODE_BLOCK_ELEMENTS", 1 << 11)
    monkeypatch.setattr(comparison, "effective_weight", lambda weight: pytest.fail("dequantized"))
    found = quantized(diff(*pair))

    assert {layer.outcome for layer in found.values()} == {"bits"}
    with open_checkpoint(pair[0]) as weights:
        assert all(layer.total == prod(weights.loader.shape(weights, n)) for n, layer in found.items())


def test_of_a_run_that_differs_the_values_are_counted(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One word of the last run, and what its codes mean: eight values at the most."""
    monkeypatch.setattr(comparison, "CODE_BLOCK_ELEMENTS", 1 << 11)
    monkeypatch.setattr(comparison, "MAX_ELEMENTS", 1 << 10)
    stored = load_file(pair[1] / "model.safetensors")
    name = next(name for name in stored if name.endswith("q_proj.qweight"))
    stored[name][-1, -1] ^= 0x77777777
    save_file(stored, pair[1] / "model.safetensors")
    (found,) = (layer for layer in diff(*pair).layers if not layer.same)

    assert (found.name, found.outcome, found.differing) == (name.rpartition(".")[0], "differs", 8)
    K, N = stored[name].shape[0], 8 * stored[name].shape[1]
    assert found.total == N * K
    assert found.detail.startswith(f"first at ({N - 8}, {K - 1})")


@pytest.mark.parametrize(("size", "block", "elements"), [(100, 8, 320), (8, 8, 1), (7, 1, 1 << 20)])
def test_runs_are_all_outputs_once_and_end_at_blocks(size: int, block: int, elements: int) -> None:
    found = list(output_blocks((0, size), 10, block, elements))

    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == size
    assert all(stop % block == 0 for _, stop in found[:-1])
    assert all((stop - start) * 10 <= max(elements, block * 10) for start, stop in found)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 24])
def test_bits_are_compared_to_the_last_byte(count: int) -> None:
    one = torch.arange(count, dtype=torch.uint8)

    assert equal_bits(one, one.clone())
    for at in range(count):
        other = one.clone()
        other[at] ^= 128
        assert not equal_bits(one, other)


def test_equal_bytes_of_another_shape_are_not_equal() -> None:
    assert not equal_bits(torch.zeros(2, 3), torch.zeros(3, 2))
