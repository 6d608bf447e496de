"""EXL2: rows sorted into groups of different widths, with a four-bit scale per group and output.

On disk, for a layer of K inputs and N outputs in G groups, R rows of words:

    q_weight     int32         (R, N)    codes, packed along K, group after group, each a stream of its width
    q_scale      int32         (G, N/8)  scales of four bits, packed along N
    q_scale_max  fp16          (G,)      unit of the group's scales, times 256
    q_groups     int16         (2*G,)    (bits, first row of q_weight) of each group; bits 8, 6, 5, 4, 3 or 2
    q_invperm    int32, int16  (K,)      position of each input in q_weight; int16 is unsigned
    q_perm       int32, int16  (K,)      inverse of q_invperm, in some older files; q_invperm decides

    s[g, n] = fp16((q + 1)**2 * fp16(q_scale_max[g] / 256)),   q the four bits of q_scale
    w[n, k] = fp16((code[j, n] - 2**(bits - 1)) * s[g, n]),    j = q_invperm[k], g the group of j

Every step is rounded to fp16, with subnormal numbers. The stored N is a multiple of 32, the outputs of the
layer and codes of zero after them, and is kept. Inputs are sorted by their width: K is never cut, and layers
are fused only with equal groups, order and q_scale_max; load others as separate layers.

Source: exllamav2 b9c025b, bit-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from qload import configs, dtypes, spec
from qload.devices import StoredStreams
from qload.dtypes import DtypeLike
from qload.errors import MismatchError, ShapeError
from qload.layouts import gptq
from qload.layouts.exl2 import RUN_CODES, Exl2Groups, unwrap_starts
from qload.lazy_torch import Tensor, torch
from qload.loader import ConfiguredFormat
from qload.sentences import WORD_BITS
from qload.spec import Role, TensorSpec
from qload.spec.tensor import array_of, check_positions

INDICES = (dtypes.int32, dtypes.int16)


@dataclass(frozen=True)
class Exl2Config(spec.Config):
    """Config of EXL2: empty beforehand, because the tensors describe themselves.

    Attributes
    ----------
    groups
        Number of groups of a described layer.
    """

    name: ClassVar[str] = "exl2"

    groups: int | None = None

    def for_layer(self, headers: spec.LayerHeaders) -> Exl2Config:
        """Check that groups in order fill q_weight and have K rows.

        ShapeError for another number of rows than K; MismatchError for an invalid group; IndexValueError if
        q_invperm is not a permutation.
        """
        specs = Exl2Weight.tensors(self)
        spec.check_dtypes(specs, headers.dtypes, headers.names)
        sizes = spec.solve(specs, headers.shapes, headers.names)
        height, K = headers.shapes["q_weight"][0], sizes["K"]
        bits, starts = _read_groups(headers, height)
        check_groups(bits, starts, headers.names)
        runs = zip(bits, pairwise(starts), strict=True)
        rows = sum((end - start) * WORD_BITS // width for width, (start, end) in runs)
        if rows != K:
            raise ShapeError(
                headers.names.full("q_invperm"),
                f"({rows},) = (K,)",
                headers.shapes["q_invperm"],
                headers.names.file("q_invperm"),
                f"for the {rows} rows of q_weight by q_groups",
            )
        check_positions("q_invperm", _read_positions(headers), headers.names)
        return replace(self, groups=sizes["G"])

    def notes(self, headers: spec.LayerHeaders) -> tuple[str, ...]:
        """Notes on a redundant q_perm, and on rising widths, unexpected by kernels."""
        notes, bits = [], headers.facts["q_groups"][0::2].tolist()
        if any(wider > width for width, wider in pairwise(bits)):
            notes.append("q_groups: widths rise, and are read as stored; kernels expect them to fall")
        if "q_perm" in headers.facts:
            q_perm = array_of(headers.names.full("q_perm"), headers.facts["q_perm"])
            same = np.array_equal(
                q_perm.astype(np.int16), np.argsort(_read_positions(headers)).astype(np.int16)
            )
            notes.append(f"q_perm is not read: q_invperm {'is equal' if same else 'differs and is believed'}")
        return tuple(notes)


@dataclass(frozen=True, eq=False, repr=False)
class Exl2Weight(spec.Weight):
    """An EXL2 layer, or a share of its outputs.

    s[g, n] = fp16((q + 1)**2 * fp16(q_scale_max[g] / 256)), q the four bits of q_scale, and w[n, k] =
    fp16((code[j, n] - 2**(bits - 1)) * s[g, n]), j = q_invperm[k], g the group of j. Source: exllamav2,
    bit-equal to its files.

    Attributes
    ----------
    q_weight
        Codes, packed along K, group after group, each a stream of its width: (R, N), int32.
    q_scale
        Scales of four bits, packed along N: (G, N / 8), int32.
    q_scale_max
        Unit of the group's scales, times 256: (G,), fp16.
    q_groups
        (bits, first row of q_weight) of each group, bits 8, 6, 5, 4, 3 or 2: (2 * G,), int16.
    q_invperm
        Position of each input in q_weight: (K,), int32, or unsigned int16.
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
        """Declare the tensors; outputs are cut at multiples of 32, inputs never."""
        return (
            TensorSpec("q_weight", (dtypes.int32,), "R N@32", Role.WORD),
            TensorSpec("q_groups", (dtypes.int16,), "G*2", Role.INDEX, fact=True),
            TensorSpec("q_invperm", INDICES, "K!", Role.INDEX, fact=True),
            TensorSpec("q_scale", (dtypes.int32,), "G N@32/8", Role.WORD),
            TensorSpec("q_scale_max", (dtypes.float16,), "G", Role.SCALE, fact=True),
            TensorSpec("q_perm", INDICES, "K!", Role.INDEX, fact=True, optional=True, spent=True),
        )

    def stored(self) -> StoredStreams:
        """Describe the stored order for kernels."""
        return StoredStreams(self.q_weight, self._rows, self.q_scale, self.q_scale_max)

    def _rows(self) -> Tensor:
        """First bit, width and group of each row of q_weight, and the position of each input: (4, K)."""
        groups = Exl2Groups.read(self.q_groups, self.q_weight.shape[0])
        order = as_positions(self.q_invperm).to(torch.int32)[None]
        return torch.cat([groups.bit_positions(self.layer.K), order])

    def codes(self) -> spec.Codes:
        """Return codes in the order of inputs, with exllamav2's scales, rounded to fp16."""
        groups, at = Exl2Groups.read(self.q_groups, self.q_weight.shape[0]), as_positions(self.q_invperm)
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
        ordered = codes.to(torch.uint8)[at], k_group[at]
        return codes_of(groups, *ordered, self.q_scale, self.q_scale_max, widest)

    def dequantize(self, dtype: DtypeLike = dtypes.float32, out: Tensor | None = None) -> Tensor:
        """Dequantize to (N, K), with the values of exllamav2's fp16."""
        return spec.rounded(super().dequantize(torch.float16), dtype, out)

    @classmethod
    def sample_facts(cls, config: Exl2Config, sizes: dict[str, int]) -> dict[str, Tensor]:
        """Groups of 64 rows, the last of 32 or 64, of falling widths; by K of `sizes`, for any `config`."""
        sizes["K"] *= 1 if sizes["K"] % 32 == 0 else 32
        K, G = sizes["K"], -(-sizes["K"] // 64)
        bits = torch.tensor(list(RUN_CODES))[torch.arange(G) * len(RUN_CODES) // G]
        ends = (bits * torch.tensor([64] * (G - 1) + [K - 64 * (G - 1)]) // 32).cumsum(0)
        sizes["G"], sizes["R"] = G, int(ends[-1])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1]])
        return {
            "q_groups": torch.stack([bits, starts], dim=1).flatten().to(torch.int16),
            "q_scale_max": (2.0 ** (torch.arange(G) % 4 - 10)).half(),  # below 2**-6: subnormal later
            "q_invperm": torch.randperm(K, generator=torch.Generator().manual_seed(K)).to(torch.int32),
        }


def codes_of(
    groups: Exl2Groups, codes: Tensor, k_group: Tensor, q_scale: Tensor, q_scale_max: Tensor, bits: int
) -> spec.Codes:
    """Typed codes from codes (K, N) and groups by input. `bits`: at least the width of every group."""
    squares = gptq.columns(4).unpack(q_scale).add(1).square()
    unit = scale_unit(q_scale_max).float()[:, None]
    scales = (squares * unit).half().float()
    zeros = (2 ** (groups.bits - 1)).to(torch.int32)[:, None].expand_as(scales)
    return spec.Codes(bits=bits, codes=codes.T, scales=scales.T, zeros=zeros.T, k_group=k_group)


def scale_unit(q_scale_max: Tensor) -> Tensor:
    """Unit of the scales: 1/256 of the stored value, rounded to fp16."""
    return (q_scale_max.float() / 256).half()


def as_positions(index: Tensor) -> Tensor:
    """Values of a permutation as int64; int16 is unsigned."""
    wide = index.to(torch.int64)
    return wide % (1 << 16) if index.dtype == torch.int16 else wide


def _read_positions(headers: spec.LayerHeaders) -> NDArray[np.int64]:
    """Read q_invperm as int64; int16 is unsigned."""
    index = array_of(headers.names.full("q_invperm"), headers.facts["q_invperm"])
    wide = index.astype(np.int64)
    return wide % (1 << 16) if index.dtype == np.int16 else wide


def _read_groups(headers: spec.LayerHeaders, height: int) -> tuple[list[int], list[int]]:
    """Read the bits of each group, and its first row and the end of the last, like `Exl2Groups.read`."""
    q_groups = array_of(headers.names.full("q_groups"), headers.facts["q_groups"])
    bits, starts = q_groups.astype(np.int64).reshape(-1, 2).T
    return bits.tolist(), [*unwrap_starts(starts, height).tolist(), height]


def check_groups(bits: list[int], starts: list[int], names: spec.Names) -> None:
    """Raise MismatchError unless groups have valid widths and fill whole runs of words, one after another."""
    wrong = _first_wrong(bits, starts, starts[-1])
    if wrong:
        raise MismatchError(names.full("q_groups"), *wrong)


def _first_wrong(bits: list[int], starts: list[int], height: int) -> tuple[str, str, str] | None:
    """Return (what, expected, got) of the first invalid group."""
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
            expected = f"a multiple of {words}: {RUN_CODES[width]} codes of {width} bits"
            return f"rows of q_weight in group {group}", expected, str(end - start)
    return None


class _EXL2(configs.Section):
    version: configs.Name = None
    bits: Annotated[float, Field(gt=0, le=16, allow_inf_nan=False)] | None = None  # mean over all layers
    head_bits: Annotated[int, Field(ge=2, le=16)] | None = None
    calibration: dict[str, Any] | None = None


def read_exl2(source: configs.FoundConfig) -> configs.Claims:
    """Read the claims of `quant_method: exl2`: none about layers, whose tensors tell the bit widths."""
    section = configs.validate(_EXL2, source)
    return section.claims(source, "exl2", "exl2", ConfiguredFormat(Exl2Weight, Exl2Config()))


FORMATS = (Exl2Weight,)
METHODS = (configs.Method(names=("exl2",), read=read_exl2, formats=(Exl2Weight,), variants=("exl2",)),)
