"""What a weight says of its own storage, read in plain torch: it means what its codes mean."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qload.devices import StoredCodes, StoredTable
from qload.formats import AWQWeight, BNBFP4Weight, BNBNF4Weight, CTPackWeight, GPTQWeight, MarlinWeight
from qload.kernel_formats import repack
from qload.layouts import Order, Packing
from qload.sentences import Sentence
from qload.spec import Weight
from qload.testing import assert_same_bits, layers
from tests.format_cases import CONFIGS

STORED = [GPTQWeight, AWQWeight, MarlinWeight, CTPackWeight, BNBNF4Weight, BNBFP4Weight]


def in_order(rows: Tensor, order: Sentence | None) -> Tensor:
    """Rows (G, N) whose columns lie in an order -> in plain order."""
    if order is None:
        return rows
    found = Order(order.pattern, **dict(order.sizes))
    return found.undo(rows) if len(found.right) == 2 else found.undo(rows.reshape(rows.shape[0], -1, 8))


def read(stored: StoredCodes | StoredTable, N: int, K: int) -> Tensor:
    """(N, K) float32, by the words of the two classes alone."""
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
    """(N, K) zero points, or one number."""
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
    if stored is None or getattr(weight.config, "bits", 4) == 3:
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
        return  # whose numbers are no codes
    codes = data.draw(layers(weight_type, CONFIGS[weight_type])).weight().codes()

    assert codes.lookup is None or codes.lookup.numel() == 2**codes.bits
