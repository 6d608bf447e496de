"""ExLlama's order: elements by hand, a large K, and the index; tests/formats compares with its writers."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from qload.errors import ArgumentError
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import ExllamaConfig, repack, restore
from qload.layouts import Stored, exllama
from qload.testing import assert_same_bits
from tests.kernels.mp_layers import Case


@pytest.mark.parametrize(
    ("bits", "k", "word", "bit"),
    [
        pytest.param(4, 0, 0, 0, id="4 bits: origin"),
        pytest.param(4, 2, 0, 4, id="4 bits: even rows first"),
        pytest.param(4, 1, 0, 16, id="4 bits: odd rows in the upper half"),
        pytest.param(4, 9, 1, 16, id="4 bits: eight rows are a word"),
        pytest.param(2, 14, 0, 14, id="2 bits: eight even rows"),
        pytest.param(2, 15, 0, 30, id="2 bits: eight odd rows"),
        pytest.param(8, 3, 0, 24, id="8 bits: as they come"),
        pytest.param(3, 10, 1, 0, id="3 bits: ten rows a word"),
        pytest.param(3, 13, 1, 19, id="3 bits: odd rows from bit 16"),
        pytest.param(3, 30, 0, 15, id="3 bits: row 30 in the bits 15"),
        pytest.param(3, 31, 0, 31, id="3 bits: row 31 in the bits 31"),
    ],
)
def test_one_element(bits: int, k: int, word: int, bit: int) -> None:
    codes = torch.zeros(32, 2, dtype=torch.int32)
    codes[k, 1] = 1

    words = exllama.rows(bits).pack(codes)

    assert words.nonzero().tolist() == [[word, 1]]
    assert int(words[word, 1]) & 0xFFFFFFFF == 1 << bit


def test_the_three_bits_of_row_31_lie_in_three_words() -> None:
    codes = torch.zeros(32, 1, dtype=torch.int32)
    codes[31] = 0b101

    words = exllama.rows(3).pack(codes).flatten().tolist()

    assert [value & 0xFFFFFFFF for value in words] == [1 << 31, 0, 1 << 31]


def test_the_permutation_holds_beyond_32767_rows() -> None:
    """A signed 16-bit permutation would be negative from 32,768 on."""
    K, N = 40_000, 8
    order = torch.randperm(K, generator=torch.Generator().manual_seed(0))
    weight = GPTQWeight(
        config=GPTQConfig(4, 8, Stored()),
        qweight=torch.arange(K // 8 * N, dtype=torch.int32).reshape(-1, N) * 0x9E3779B1,
        qzeros=torch.zeros(K // 8, 1, dtype=torch.int32),
        scales=torch.ones(K // 8, N, dtype=torch.float16),
        g_idx=(order // 8).to(torch.int32),
    )

    packed = repack(weight, "exllama")

    assert int(packed.fields()["q_perm"].max()) == K - 1
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert_same_bits(restore(packed).fields()["qweight"], weight.qweight)


def test_rows_in_order_need_no_permutation() -> None:
    weight = GPTQWeight(
        config=GPTQConfig(4, 8, Stored()),
        qweight=torch.full((2, 8), 0x76543210, dtype=torch.int32),
        qzeros=torch.zeros(2, 1, dtype=torch.int32),
        scales=torch.ones(2, 8, dtype=torch.float16),
        g_idx=torch.arange(16, dtype=torch.int32) // 8,
    )

    packed = repack(weight, "exllama")

    assert "q_perm" not in packed.fields()
    assert int(packed.fields()["qweight"][0, 0]) == 0x75316420


TURNS = torch.arange(256, dtype=torch.int32) % 8  # rows of eight groups in rotation
HALVES = (torch.arange(256) // 128).to(torch.int32)


@pytest.mark.parametrize(("index", "run"), [(TURNS, 0), (HALVES, 128)], ids=["in turns", "halves"])
@pytest.mark.parametrize("way", ["holding", "replace", "module"])
def test_a_new_index_overrules_the_config(way: str, index: torch.Tensor, run: int) -> None:
    even: Any = repack(Case(bits=4).weight(), "exllama")
    assert even.config.run == 32

    if way == "holding":
        other = even.holding({"g_idx": index})
    elif way == "replace":
        other = replace(even, g_idx=index)
    else:
        module: Any = even.get_linear()
        module.g_idx = index
        other = module.typed

    codes = even.codes()
    w = (codes.plain() - codes.zeros[:, index.long()]) * codes.scales[:, index.long()]
    assert (other.config.run, even.config.run) == (run, 32)
    assert_same_bits(other.dequantize(), w)
    stored = other.stored()
    assert (stored.run, stored.k_group is None) == (run or 256, run > 0)


def test_the_run_of_an_index_survives_a_move_to_meta() -> None:
    even: Any = repack(Case(bits=4).weight(), "exllama")
    on_meta = even.holding({name: tensor.to("meta") for name, tensor in even.fields().items()})

    assert on_meta.config == even.config
    assert on_meta.holding(even.fields()).config == even.config
    assert even.to("cpu").config == even.config


def test_other_bits_are_refused() -> None:
    with pytest.raises(ArgumentError, match="exllama: bits"):
        ExllamaConfig(bits=5)
