"""The checks of `PackerSuite`: the tensors of a packer against those of the layer of its codes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance.cases import ConformanceCase
from qload.conformance.linear_checks import load_shares
from qload.spec import Codes, Weight
from qload.testing import checks


class PackerChecks:
    """The checks of a packer for one case: `suite`, a `PackerSuite`, and `case`."""

    def __init__(self, suite: Any, case: ConformanceCase) -> None:
        if case.world > 1:
            pytest.skip("a packer packs whole layers")
        self.suite, self.case = suite, case
        self.weight: Weight = load_shares(replace(case, M=1), "noise")[0]

    def packs_to_the_bit(self) -> None:
        """The tensors of `pack` equal the stored ones."""
        packed = dict(self.suite.pack(self._codes(), self.case))
        assert packed, "pack returned no tensor"
        fields = self.weight.fields()
        unknown = sorted(set(packed) - set(fields))
        assert not unknown, f"{unknown[0]} is no tensor of {self.case.format}: those are {', '.join(fields)}"
        for name, tensor in packed.items():
            with checks.error_prefix(f"{name}: "):
                _assert_same(tensor, fields[name])

    def unpacks_what_is_stored(self) -> None:
        """The codes (N, K) of `unpack` equal those of the layer."""
        got = self.suite.unpack(dict(self.weight.fields()), self.case)
        if got is None:
            pytest.skip("the subject only packs")
        with checks.error_prefix("codes (n, k): "):
            checks.assert_same_bits(got.to(torch.int64), self._codes().plain().to(torch.int64))

    def the_codes_are_left_alone(self) -> None:
        """Codes, scales, zero points and groups are the same before and after."""
        given, before = self._codes(), self._codes()
        self.suite.pack(given, self.case)
        for name in ("codes", "scales", "zeros", "k_group"):
            tensor = getattr(given, name)
            if isinstance(tensor, Tensor):
                with checks.error_prefix(f"packing changes {name}: "):
                    checks.assert_same_bits(tensor, getattr(before, name))

    def _codes(self) -> Codes:
        """Copies of the codes in plain order, and of scales, zero points and groups."""
        codes = self.weight.codes()
        group = None if codes.k_group is None else codes.k_group.clone()
        zeros = None if codes.zeros is None else codes.zeros.clone()
        return replace(
            codes, codes=codes.plain().clone(), scales=codes.scales.clone(), zeros=zeros, k_group=group
        )


def _assert_same(got: Tensor, want: Tensor) -> None:
    same = (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape))
    assert same, f"{got.dtype}, {tuple(got.shape)}; expected {want.dtype}, {tuple(want.shape)}"
    with checks.error_prefix(f"{_word_difference(got, want)}: " if want.dtype == torch.int32 else ""):
        checks.assert_same_bits(got, want)


def _word_difference(got: Tensor, want: Tensor) -> str:
    """The known mistake that explains all words, or the first words."""
    own_bytes = want.contiguous().view(torch.uint8).reshape(-1, 4)
    for name, mistaken in (
        ("the bytes of words are reversed", own_bytes.flip(1)),
        ("the nibbles of bytes are swapped", (own_bytes << 4) | (own_bytes >> 4)),
    ):
        if torch.equal(got.contiguous().view(torch.uint8).reshape(-1, 4), mistaken):
            return name
    first, expected = (int(t.reshape(-1)[0]) & 0xFFFFFFFF for t in (got, want))
    return f"the first word is {first:08x}, expected {expected:08x}"
