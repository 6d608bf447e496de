"""EXL2: rows sorted into groups of different widths, one four-bit scale a group and output.

On disk, for a layer of K inputs and N outputs in G groups, R rows of words:

    q_weight     int32         (R, N)    codes, packed along K, group after group, each a stream of its width
    q_scale      int32         (G, N/8)  scales of four bits, packed along N
    q_scale_max  fp16          (G,)      what a group's scales count in, times 256
    q_groups     int16         (2*G,)    (bits, first row of q_weight) of each group; bits 8, 6, 5, 4, 3 or 2
    q_invperm    int32, int16  (K,)      where in the order of q_weight each input lies; int16 has no sign
    q_perm       int32, int16  (K,)      of some older files: the inverse of q_invperm, which is believed

    s[g, n] = fp16((q + 1)**2 * fp16(q_scale_max[g] / 256)),   q the four bits of q_scale
    w[n, k] = fp16((code[j, n] - 2**(bits - 1)) * s[g, n]),    j = q_invperm[k], g the group of j

Every step is rounded to fp16, subnormal numbers too. N is stored as a multiple of 32, a layer's own outputs
followed by codes that mean zero, and is taken as it is stored. Inputs are sorted by how many bits they got,
so K is never cut, and layers are fused only where groups, order and q_scale_max are the same in all: load
others as layers of their own. Source: exllamav2 b9c025b, bit-equal to it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from qload import spec
from qload.devices import StoredStreams
from qload.errors import IndexValueError, MismatchError, ShapeError
from qload.layouts import gptq
from qload.layouts.exl2 import RUN_CODES, Exl2Groups
from qload.sentences import WORD_BITS
from qload.spec import Role, TensorSpec

INDICES = (torch.int32, torch.int16)


@dataclass(frozen=True)
class Exl2Config(spec.Config):
    """An EXL2 checkpoint's config: nothing has to be said beforehand, as the tensors tell all.

    Attributes
    ----------
    groups
        How many groups the layer has, once it was looked at.
    """

    name: ClassVar[str] = "exl2"

    groups: int | None = None

    def for_layer(self, headers: spec.LayerHeaders) -> "Exl2Config":
        """Groups in order that fill q_weight and have K rows, or the first thing that is wrong with them.

        ShapeError where they have other rows than the layer; MismatchError for a group that cannot be;
        IndexValueError where q_invperm is no permutation.
        """
        specs = Exl2Weight.tensors(self)
        spec.check_dtypes(specs, headers.dtypes, headers.names)
        sizes = spec.solve(specs, headers.shapes, headers.names)
        height, K = headers.shapes["q_weight"][0], sizes["K"]
        groups = Exl2Groups.read(headers.facts["q_groups"], height)
        check_groups(groups, headers.names)
        rows = int(groups.rows.sum())
        if rows != K:
            raise ShapeError(
                headers.names.full("q_invperm"),
                f"({rows},) = (K,)",
                headers.shapes["q_invperm"],
                headers.names.file("q_invperm"),
                f"for the {rows} rows that q_groups finds in q_weight",
            )
        check_permutation(headers.facts["q_invperm"], headers.names)
        return replace(self, groups=sizes["G"])

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """What is stored twice, and widths that rise, which no kernel expects."""
        found, bits = [], headers.facts["q_groups"][0::2]
        if bool((bits[1:] > bits[:-1]).any()):
            found.append("q_groups: widths rise, and are read as they stand; kernels take them to fall")
        if "q_perm" in headers.facts:
            q_perm, order = headers.facts["q_perm"], torch.argsort(places(headers.facts["q_invperm"]))
            same = torch.equal(q_perm.to(torch.int16), order.to(torch.int16))
            found.append(
                f"q_perm is not read: q_invperm {'says the same' if same else 'differs and is believed'}"
            )
        return tuple(found)


@dataclass(frozen=True, eq=False, repr=False)
class Exl2Weight(spec.Weight):
    """An EXL2 layer, or a share of its outputs.

    s[g, n] = fp16((q + 1)**2 * fp16(q_scale_max[g] / 256)), q the four bits of q_scale, and w[n, k] =
    fp16((code[j, n] - 2**(bits - 1)) * s[g, n]), j = q_invperm[k], g the group of j. Source: the files of
    exllamav2, to which it is bit-equal.

    Attributes
    ----------
    q_weight
        Codes, packed along K, group after group, each a stream of its width: (R, N), int32.
    q_scale
        Scales of four bits, packed along N: (G, N / 8), int32.
    q_scale_max
        What a group's scales count in, times 256: (G,), fp16.
    q_groups
        (bits, first row of q_weight) of each group, bits 8, 6, 5, 4, 3 or 2: (2 * G,), int16.
    q_invperm
        Where in the order of q_weight each input lies: (K,), int32, or int16 without a sign.
    """

    config: Exl2Config
    q_weight: Tensor
    q_scale: Tensor
    q_scale_max: Tensor
    q_groups: Tensor
    q_invperm: Tensor

    format: ClassVar[str] = "exl2"
    example: ClassVar[Exl2Config] = Exl2Config()

    @classmethod
    def tensors(cls, config: Exl2Config) -> tuple[TensorSpec, ...]:
        """Outputs are cut by 32, inputs never."""
        return (
            TensorSpec("q_weight", (torch.int32,), "R N@32", Role.WORD),
            TensorSpec("q_groups", (torch.int16,), "G*2", Role.INDEX, fact=True),
            TensorSpec("q_invperm", INDICES, "K!", Role.INDEX, fact=True),
            TensorSpec("q_scale", (torch.int32,), "G N@32/8", Role.WORD),
            TensorSpec("q_scale_max", (torch.float16,), "G", Role.SCALE, fact=True),
            TensorSpec("q_perm", INDICES, "K!", Role.INDEX, fact=True, optional=True, spent=True),
        )

    def stored(self) -> StoredStreams:
        """As it lies."""
        return StoredStreams(self.q_weight, self._rows, self.q_scale, self.q_scale_max)

    def _rows(self) -> Tensor:
        """First bit, width and group of each row of q_weight, and where each input lies: int32 (4, K)."""
        groups = Exl2Groups.read(self.q_groups, self.q_weight.shape[0])
        order = places(self.q_invperm).to(torch.int32)[None]
        return torch.cat([groups.bit_positions(self.layer.K), order])

    def codes(self) -> spec.Codes:
        """Codes with every row back at its input; the scales are the owner's, in fp16's values."""
        groups, at = Exl2Groups.read(self.q_groups, self.q_weight.shape[0]), places(self.q_invperm)
        if self.q_weight.is_cuda:  # a graph may be captured, in which the host reads no widths
            K = self.layer.K
            codes, k_group, widest = (
                groups.gather(self.q_weight, K),
                groups.bit_positions(K)[2].long(),
                max(RUN_CODES),
            )
        else:
            codes, k_group = groups.unpack(self.q_weight), groups.of_rows()
            widest = int(groups.bits.max())
        found = codes.to(torch.uint8)[at], k_group[at]
        return codes_of(groups, *found, self.q_scale, self.q_scale_max, widest)

    def dequantize(self, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
        """(N, K) with the values that the owner's fp16 has."""
        return spec.rounded(super().dequantize(torch.float16), dtype, out)


def codes_of(
    groups: Exl2Groups, codes: Tensor, k_group: Tensor, q_scale: Tensor, q_scale_max: Tensor, bits: int
) -> spec.Codes:
    """Codes (K, N) by input, the group of each, and a layer's scales. `bits`: at least that of any group."""
    squares = gptq.columns(4).unpack(q_scale).add(1).square()
    unit = divided(q_scale_max).float()[:, None]
    scales = (squares * unit).half().float()
    zeros = (2 ** (groups.bits - 1)).to(torch.int32)[:, None].expand_as(scales)
    return spec.Codes(bits=bits, codes=codes.T, scales=scales.T, zeros=zeros.T, k_group=k_group)


def divided(q_scale_max: Tensor) -> Tensor:
    """What scales count in: 1/256 of what is stored, rounded to fp16; the stored tensor stays as it is."""
    return (q_scale_max.float() / 256).half()


def places(index: Tensor) -> Tensor:
    """The values of a permutation, int64; 16 bits have no sign."""
    wide = index.to(torch.int64)
    return wide % (1 << 16) if index.dtype == torch.int16 else wide


def check_permutation(index: Tensor, names: spec.Names) -> None:
    """Every input has a place of its own in q_weight, or IndexValueError."""
    at, K = places(index), index.numel()
    wrong = (at < 0) | (at >= K)
    taken = torch.bincount(at[~wrong], minlength=K)
    wrong[~wrong] = taken[at[~wrong]] > 1
    if bool(wrong.any()):
        first, file = int(wrong.nonzero()[0, 0]), names.file("q_invperm")
        count = int(wrong.sum())
        raise IndexValueError(names.full("q_invperm"), int(at[first]), first, K, count, file, "each once")


def check_groups(groups: Exl2Groups, names: spec.Names) -> None:
    """Every group has a width there is and fills runs of words, one after another, or MismatchError."""
    name, height = names.full("q_groups"), int(groups.starts[-1])
    wrong = _first_wrong(groups.bits.tolist(), groups.starts.tolist(), height)
    if wrong:
        raise MismatchError(name, *wrong)


def _first_wrong(bits: list[int], starts: list[int], height: int) -> tuple[str, str, str] | None:
    """(what, expected, got) of the first group that cannot be."""
    if not bits:
        return "no groups", "(bits, first row of q_weight) of each", "nothing"
    if starts[0]:
        return "first row of group 0", "0", str(starts[0])
    groups = list(enumerate(zip(bits, starts, starts[1:], strict=False)))
    for group, (width, start, end) in groups:
        if width not in RUN_CODES:
            return f"bits of group {group}", "8, 6, 5, 4, 3 or 2", str(width)
        if end <= start and group + 1 == len(bits):
            return f"first row of group {group}", f"less than {height}, the rows of q_weight", str(start)
        if end <= start:
            return (
                f"first row of group {group + 1}",
                f"more than {start}, where group {group} begins",
                str(end),
            )
    for group, (width, start, end) in groups:
        words = RUN_CODES[width] * width // WORD_BITS
        if (end - start) % words:
            held = f"a multiple of {words}, which hold {RUN_CODES[width]} codes of {width} bits"
            return f"rows of q_weight in group {group}", held, str(end - start)
    return None
