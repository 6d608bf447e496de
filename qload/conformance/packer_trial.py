"""The checks of `PackerSuite`: a packer's tensors beside those of a layer whose codes it was given."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.conformance.case import ConformanceCase
from qload.conformance.linear_trial import shares
from qload.conformance.prefixed import prefixed
from qload.spec import Codes, Weight
from qload.testing import checks


class PackerTrial:
    """A packer and one case: `suite`, a `PackerSuite`, and `case`."""

    def __init__(self, suite: Any, case: ConformanceCase) -> None:
        if case.world > 1:
            pytest.skip("a packer packs whole layers")
        self.suite, self.case = suite, case
        self.weight: Weight = shares(replace(case, M=1, rank=0), "noise")[0]

    def packs_to_the_bit(self) -> None:
        """The tensors that it returns."""
        made = dict(self.suite.pack(self._codes(), self.case))
        assert made, "pack returned no tensor"
        fields = self.weight.fields()
        unknown = sorted(set(made) - set(fields))
        assert not unknown, f"{unknown[0]} is no tensor of {self.case.format}: those are {', '.join(fields)}"
        for name, tensor in made.items():
            with prefixed(f"{name}: "):
                self._same(tensor, fields[name])

    def unpacks_what_is_stored(self) -> None:
        """The codes (N, K)."""
        got = self.suite.unpack(dict(self.weight.fields()), self.case)
        if got is None:
            pytest.skip("the subject only packs")
        with prefixed("codes (n, k): "):
            checks.assert_same_bits(got.to(torch.int64), self._codes().plain().to(torch.int64))

    def the_codes_are_left_alone(self) -> None:
        """Codes, scales, zero points and groups before and after."""
        given, before = self._codes(), self._codes()
        self.suite.pack(given, self.case)
        for name in ("codes", "scales", "zeros", "k_group"):
            own, kept = getattr(given, name), getattr(before, name)
            if isinstance(own, Tensor):
                with prefixed(f"packing changes {name}: "):
                    checks.assert_same_bits(own, kept)

    def _codes(self) -> Codes:
        """In plain order, copies."""
        made = self.weight.codes()
        group = None if made.k_group is None else made.k_group.clone()
        zeros = None if made.zeros is None else made.zeros.clone()
        return replace(
            made, codes=made.plain().clone(), scales=made.scales.clone(), zeros=zeros, k_group=group
        )

    def _same(self, got: Tensor, want: Tensor) -> None:
        __tracebackhide__ = True
        same = (got.dtype, tuple(got.shape)) == (want.dtype, tuple(want.shape))
        assert same, f"{got.dtype}, {tuple(got.shape)}; expected {want.dtype}, {tuple(want.shape)}"
        with prefixed(f"{_words(got, want)}: " if want.dtype == torch.int32 else ""):
            checks.assert_same_bits(got, want)


def _words(got: Tensor, want: Tensor) -> str:
    """Which known mistake turns one word into the other, or what the first words are."""
    for name, made in (
        ("the bytes of words are reversed", want.view(torch.uint8).reshape(-1, 4).flip(1)),
        ("the nibbles of bytes are swapped", _nibbles_swapped(want)),
    ):
        if torch.equal(got.contiguous().view(torch.uint8).reshape(-1, 4), made):
            return name
    first, due = (int(t.reshape(-1)[0]) & 0xFFFFFFFF for t in (got, want))
    return f"the first word is {first:08x}, expected {due:08x}"


def _nibbles_swapped(want: Tensor) -> Tensor:
    bytes_ = want.contiguous().view(torch.uint8).reshape(-1, 4)
    return (bytes_ << 4) | (bytes_ >> 4)
