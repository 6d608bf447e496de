"""Values of a weight from its description of storage, in plain torch, against the values of its codes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.devices import Stored, StoredCodes, StoredRows, StoredSparse, StoredStreams, StoredTable
from qload.formats import (
    AWQWeight,
    BNBFP4Weight,
    BNBNF4Weight,
    CTIntWeight,
    CTMXFP4Weight,
    CTPackWeight,
    EETQWeight,
    Exl2Weight,
    Fp8Weight,
    GPTQWeight,
    Marlin24Weight,
    MarlinWeight,
    ModelOptAWQWeight,
    ModelOptInt8Weight,
    MXFP8Weight,
)
from qload.kernel_formats import repack
from qload.layouts import Order, Packing
from qload.sentences import Sentence
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.format_cases import CONFIGS

STORED = [
    GPTQWeight,
    AWQWeight,
    MarlinWeight,
    CTPackWeight,
    BNBNF4Weight,
    BNBFP4Weight,
    EETQWeight,
    Fp8Weight,
    MXFP8Weight,
    CTMXFP4Weight,
    CTIntWeight,
    ModelOptAWQWeight,
    ModelOptInt8Weight,
    Marlin24Weight,
    Exl2Weight,
]
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FOUR_BITS = {
    "e2m1": torch.tensor([*MAGNITUDES, *(-each for each in MAGNITUDES)]),
    "int4": (torch.arange(16) + 8) % 16 - 8.0,
}


def in_order(rows: Tensor, order: Sentence | None) -> Tensor:
    """Return rows (G, N) in plain order; `order` describes the order of their columns."""
    if order is None:
        return rows
    found = Order(order.pattern, **dict(order.sizes))
    return found.undo(rows) if len(found.right) == 2 else found.undo(rows.reshape(rows.shape[0], -1, 8))


def wide(scales: Tensor) -> Tensor:
    """Return scales as float32; decode exponents by hand."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales.float()
    exponents = scales.view(torch.uint8).double()
    return torch.where(exponents == 255, torch.nan, (exponents - 127).exp2()).float()


def of_rows(stored: StoredRows, N: int, K: int) -> Tensor:
    """Decode bytes, or two codes per byte."""
    codes = stored.codes
    if stored.four_bits is None:
        values = codes.float()
    else:
        axis = 1 if stored.across else 2
        nibbles = torch.stack([codes & 15, codes >> 4], axis).reshape(N, K)
        values = FOUR_BITS[stored.four_bits][nibbles.long()]
    place = torch.arange(N)[:, None] // stored.n_run, torch.arange(K) // stored.k_run
    if stored.zeros is not None:
        values = values - stored.zeros.float()[place]
    scales = wide(stored.scales)[place]
    return values / scales if stored.divide else values * scales


def of_sparse(stored: StoredSparse, N: int, K: int) -> Tensor:
    """Decode two of every four codes; the others are 0."""
    sentence = stored.codes.packing
    packing = Packing(sentence.bits, sentence.pattern, fields=sentence.fields, **dict(sentence.sizes))
    kept = packing.unpack(stored.codes.words)
    kept = (kept.T if stored.codes.turned else kept) - 8
    fields = stored.places().int() & 0xFFFF
    at = torch.stack([fields >> 2 * i & 3 for i in range(8)], 2).reshape(N, K // 4, 2)
    dense = torch.zeros(N, K // 4, 4).scatter_(2, at.long(), kept.reshape(N, K // 4, 2).float())
    return dense.reshape(N, K) * stored.scales.float()[:, torch.arange(K) // stored.run]


def of_streams(stored: StoredStreams, N: int, K: int) -> Tensor:
    """Decode codes bit by bit."""
    starts, widths, groups, order = (row.tolist() for row in stored.rows())
    words = (stored.words.long() & 0xFFFFFFFF).tolist()
    columns = [sum(row[n] << 32 * r for r, row in enumerate(words)) for n in range(N)]
    roots = torch.stack([stored.squares >> 4 * i & 15 for i in range(8)], 2).flatten(1)[:, :N] + 1
    units = (stored.units.float() / 256).half().float()[:, None]
    scales = (roots * roots * units).half().float()
    made = torch.empty(N, K)
    for k, r in enumerate(order):
        codes = [column >> starts[r] & 2 ** widths[r] - 1 for column in columns]
        made[:, k] = (torch.tensor(codes) - 2 ** (widths[r] - 1)).float() * scales[groups[r]]
    return made.half().float()


def read(stored: Stored, N: int, K: int) -> Tensor:
    """Return the values (N, K) as float32, from the documentation of the classes alone."""
    if isinstance(stored, StoredRows):
        return of_rows(stored, N, K)
    if isinstance(stored, StoredSparse):
        return of_sparse(stored, N, K)
    if isinstance(stored, StoredStreams):
        return of_streams(stored, N, K)
    if isinstance(stored, StoredTable):
        each = torch.stack([stored.codes.flatten() >> 4, stored.codes.flatten() & 15], 1).flatten()[: N * K]
        scales = stored.scales.repeat_interleave(stored.blocksize)[: N * K]
        return (stored.table[each.long()] * scales).reshape(N, K)
    sentence = stored.codes.packing
    packing = Packing(sentence.bits, sentence.pattern, fields=sentence.fields, **dict(sentence.sizes))
    codes = packing.unpack(stored.codes.words)
    codes = codes.T if stored.codes.turned else codes
    group = torch.arange(K) // stored.run if stored.k_group is None else stored.k_group.long()
    scales = in_order(stored.scales.T.contiguous(), stored.scale_order).float().T[:, group]
    return scales * (codes - zeros(stored, packing.bits, N, group)).float()


def zeros(stored: StoredCodes, bits: int, N: int, group: Tensor) -> Tensor:
    """Return zero points (N, K), or one number."""
    if stored.zeros is None:
        return torch.tensor(2 ** (bits - 1))
    if stored.zero_rule is None:
        return stored.zeros[:, group]
    rule, run = stored.zero_rule, 32 // bits
    words = (stored.zeros.long() + rule.add_to_word) & 0xFFFFFFFF
    fields = torch.stack([words >> bits * i & 2**bits - 1 for i in range(run)], 2)
    points = (fields + rule.add) & rule.mask
    if stored.zero_order is None:
        return points.flatten(1)[:, :N].T[:, group]
    order = Order(stored.zero_order.pattern, **dict(stored.zero_order.sizes))
    return order.undo(points.int())[:, :N].T[:, group]


@pytest.mark.parametrize("weight_type", STORED, ids=lambda weight_type: weight_type.format)
@given(data=st.data())
def test_what_is_stored_means_what_the_codes_mean(weight_type: type[Weight], data: Any) -> None:
    weight = data.draw(layers(weight_type, CONFIGS[weight_type])).weight()
    stored = weight.stored()
    if stored is None or (isinstance(stored, StoredCodes) and stored.codes.packing.bits == 3):
        return  # devices read these by their codes

    assert_same_bits(read(stored, *weight.shape), weight.dequantize())


@pytest.mark.parametrize("layout", ["exllama", "marlin", "strips"])
@pytest.mark.parametrize("group", [-1, 32, 128])
def test_a_repacked_weight_says_it_too(layout: str, group: int) -> None:
    make = torch.Generator().manual_seed(group + 1)
    K, N, groups = 512, 384, 1 if group == -1 else 512 // group

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=make, dtype=torch.int64).to(torch.int32)

    scales = (torch.rand(groups, N, generator=make) * 0.02).half()
    config = type(AWQWeight.example)(group)
    weight = repack(
        AWQWeight(config=config, qweight=words(K, N // 8), qzeros=words(groups, N // 8), scales=scales),
        layout,
    )
    stored = weight.stored()

    assert stored is not None
    assert_same_bits(read(stored, N, K), weight.dequantize())


@pytest.mark.parametrize("weight_type", CONFIGS, ids=lambda weight_type: weight_type.format)
@given(data=st.data())
def test_a_lookup_has_a_value_for_each_code_of_so_many_bits(weight_type: type[Weight], data: Any) -> None:
    if weight_type.plain:
        return  # its numbers are not codes
    codes = data.draw(layers(weight_type, CONFIGS[weight_type])).weight().codes()

    assert codes.lookup is None or codes.lookup.numel() == 2**codes.bits
