"""Products of x and a weight by the CPU module: codes become floats in registers, or in the cache.

Few tokens read each byte of panels once and write it nowhere; for more tokens some rows of some panels are
dequantized in the cache and multiplied there. Codes in rows are dequantized there for any number of tokens:
nf4 and fp4, MXFP4 and NVFP4, FP8, 8-bit integers, and packed integers with words along the inputs need no
order of their own. `csrc/cpu/product.h` defines the result and the order of its sums: the same bits on any
number of threads.

A table, written by `nox -s bench -- --dispatch`, ranks the ways of a product by time. A row of it: kind and
width of a weight, type of the activations, instruction set, largest number of tokens, ways from the fastest
on. More tokens than in any row go the way of the last.

    registers  panels: codes become floats in registers
    cache      panels and rows: some become floats in the cache; few tokens with rows in registers, too
    pairs      EETQ: its pairs of outputs are read as rows
    torch      the weight is dequantized in slices, and torch multiplies
"""

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from qload.devices.cpu import has_routines, values_of
from qload.devices.operands import Meaning, meaning_of
from qload.devices.tensors import FLOATS, address, dense, is_plain
from qload.errors import ArgumentError
from qload.formats import (
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    CTPackWeight,
    EETQWeight,
    Fp8Weight,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
)
from qload.kernel_formats.panels import CODE_BITS, PanelsConfig, PanelsWeight
from qload.kernel_formats.repack import find_unsupported_panels
from qload.layouts import ClippedCodes, NibblePairs, PackedCodes, eetq
from qload.native import is_on, isa, load, threads
from qload.sentences.strided_digits import stream_axis
from qload.spec import Codes, Weight

BYTE = 8
BYTE_SCALES = (torch.float32, torch.uint8, torch.float8_e4m3fn)  # what scales of rows are: floats, exponents
MOST_COMPARED = 8
MAX_CODES = 1 << 16  # codes of a row: an int32 holds sums of fewer
SIGNED = torch.arange(2**BYTE, dtype=torch.uint8).view(torch.int8).float()  # of each byte
ROW_TYPES: tuple[type[Weight], ...] = (  # formats that store rows, or of which some layers do
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    CTMXFP4Weight,
    CTNVFP4Weight,
    CTPackTensorWeight,
    CTPackWeight,
    EETQWeight,
    Fp8Weight,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP8Weight,
)


@dataclass(frozen=True, eq=False)
class CodeRows:
    """Packed codes of each output, one after another: `bytes` uint8 (N, row bytes), rows of any stride.

    `bits` of a code, 2 to 8; `high_first`: of 4 bits, the first of two lies in the high half. Scales of the
    `meaning` are of a type of `BYTE_SCALES`: exponents (e8m0) and e4m3fn are multiplied by `second`, or
    `divided` by it, and rounded once.
    """

    bytes: Tensor
    bits: int
    high_first: bool
    meaning: Meaning
    second: float = 1.0
    divided: bool = False


@dataclass(frozen=True)
class _Kept:
    """Rows of tensors with the addresses `seen`, and copies of the bytes of some, by field number."""

    seen: tuple[tuple[object, ...], ...]
    copies: dict[int, "numpy.ndarray[Any, Any]"]
    rows: CodeRows | None

    def stands_for(self, tensors: list[Tensor]) -> bool:
        return all(numpy.array_equal(_raw(tensors[at]).numpy(), copy) for at, copy in self.copies.items())


class KeptRows:
    """Result of `rows_of` for a layer's weight, between calls.

    Codes, and what else a product reads as it is stored, are read where they lie. Of each tensor that becomes
    another, as scales do, a copy is kept too and compared before each use, so that a write is seen whoever
    makes it. Where these are more than a part in `MOST_COMPARED` of the weight, nothing is kept.
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None  # replaced as a whole: threads may share a layer

    def of(self, weight: Weight) -> CodeRows | None:
        """`rows_of` a weight, from an earlier call if nothing was written since."""
        tensors = [tensor.detach() for tensor in weight.fields().values()]
        seen = tuple((each.data_ptr(), each.shape, each.stride(), each.dtype) for each in tensors)
        kept = self._kept
        if kept is not None and kept.seen == seen and kept.stands_for(tensors):
            return kept.rows
        rows = rows_of(weight)
        read = [] if rows is None else [rows.bytes, *rows.meaning.tensors()]
        others = [at for at, tensor in enumerate(tensors) if not any(_lies_in(tensor, each) for each in read)]
        compared, stored = sum(tensors[at].nbytes for at in others), sum(each.nbytes for each in tensors)
        whole = all(tensors[at].is_contiguous() for at in others)
        keeps = rows is not None and whole and compared * MOST_COMPARED <= stored
        self._kept = (
            _Kept(seen, {at: _raw(tensors[at]).clone().numpy() for at in others}, rows) if keeps else None
        )
        return rows


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def _lies_in(tensor: Tensor, other: Tensor) -> bool:
    """Return whether a tensor lies in the memory of another: in a contiguous one, or on the same rows."""
    first, begin = tensor.data_ptr(), other.data_ptr()
    if not other.is_contiguous():  # between whose rows there may be other tensors
        return first == begin and tensor.nbytes == other.nbytes
    return begin <= first and first + tensor.nbytes <= begin + other.nbytes and tensor.nbytes > 0


def rows_of(weight: Weight) -> CodeRows | None:
    """Codes of a matrix in rows, and their meaning; None for any other order."""
    if not isinstance(weight, ROW_TYPES) or weight.input_factors is not None:
        return None
    signed = isinstance(weight, CTIntWeight) and weight.config.bits == BYTE
    codes = weight.signed() if signed else weight.codes()  # type: ignore[attr-defined]
    found = _bytes(codes)
    meaning = None if found is None else meaning_of(codes)
    if found is None or meaning is None or not all(each.is_contiguous() for each in meaning.tensors()):
        return None
    if signed and meaning.zeros is not None and not meaning.zeros.any():
        meaning = replace(meaning, zeros=None)
    if isinstance(codes.codes, Tensor) and codes.codes.dtype == torch.int8:
        if meaning.lookup is not None:
            return None
        meaning = replace(meaning, lookup=SIGNED)
    elif isinstance(codes.codes, Tensor) and meaning.lookup is not None:
        meaning = replace(meaning, lookup=_of_each_byte(meaning.lookup))
    high_first = isinstance(codes.codes, NibblePairs) and codes.codes.high_first
    bits = BYTE if isinstance(codes.codes, Tensor) else codes.bits
    made = _with_stored_scales(CodeRows(found, bits, high_first, meaning), weight)
    return made if has_routines(found, *meaning.tensors()) else None


def _with_stored_scales(rows: CodeRows, weight: Weight) -> CodeRows:
    """Rows with the stored scales, if these are bytes."""
    scales, second, divided = None, 1.0, False
    if isinstance(weight, CTMXFP4Weight | MXFP8Weight):
        scales = weight.exponents
    elif isinstance(weight, CTNVFP4Weight | ModelOptNVFP4Weight):
        divided = isinstance(weight, CTNVFP4Weight)
        both = weight.weight_global_scale if isinstance(weight, CTNVFP4Weight) else weight.weight_scale_2
        if both is None or both.numel() == 1:
            scales, second = weight.plain_scales, 1.0 if both is None else float(both)
    whole = scales is not None and scales.is_contiguous() and scales.shape == rows.meaning.scales.shape
    if not whole or scales is None or rows.meaning.n_group is not None:
        return rows
    return replace(rows, meaning=replace(rows.meaning, scales=scales), second=second, divided=divided)


def _of_each_byte(lookup: Tensor) -> Tensor:
    """Extend a lookup table to 256 values, with NaN, for narrower codes of a byte each."""
    return torch.nn.functional.pad(lookup, (0, 2**BYTE - len(lookup)), value=torch.nan)


def _bytes(codes: Codes) -> Tensor | None:
    """Codes as rows of bytes; None for any other order."""
    held = codes.codes
    if isinstance(held, Tensor):
        plain = held.dtype in (torch.uint8, torch.int8) and held.ndim == 2 and held.stride(1) == 1
        return held.view(torch.uint8) if plain else None
    if isinstance(held, NibblePairs):
        return held.bytes if held.bytes.stride(1) == 1 else None
    packed = held.packed if isinstance(held, ClippedCodes) else held
    if not isinstance(packed, PackedCodes) or packed.order is not None or packed.turned:
        return None
    return dense(packed.words).view(torch.uint8) if stream_axis(packed.packing) == 1 else None


def rows_of_pairs(weight: EETQWeight) -> CodeRows:
    """The bytes of contiguous codes as rows (N / 2, 2 K), less 128, without scales."""
    K, N = weight.weight.shape
    zeros = torch.full((1, 1), 2.0 ** (BYTE - 1))
    meaning = Meaning(torch.ones(1, 1), zeros, None, None, None, 2 * K, False, 1.0)
    return CodeRows(weight.weight.view(torch.uint8).view(N // 2, 2 * K), BYTE, False, meaning)


def inputs_of_pairs(x: Tensor) -> Tensor:
    """Tokens (M, K) of any type -> (2 M, 2 K), float32: of output 2i of all pairs, then of output 2i + 1."""
    M, K = x.shape
    both = torch.zeros(2, M, K // eetq.TILE, 2, eetq.TILE)
    lying = x.view(M, K // eetq.TILE, 4, 2, 4, 2).permute(0, 1, 2, 4, 5, 3)
    for u in range(2):
        both[u, :, :, u].view(lying.shape).copy_(lying)
    return both.view(2 * M, 2 * K)


def outputs_of_pairs(sums: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Float32 (2 M, N / 2) -> (M, N), scaled, plus a float32 bias, rounded once to a dtype."""
    M, pairs = sums.shape[0] // 2, sums.shape[1]
    y = sums.view(2, M, pairs).permute(1, 2, 0).reshape(M, 2 * pairs) * scales.float()
    return (y if bias is None else y.add_(bias)).to(dtype)


def sums_of_codes(x: Tensor, codes: Tensor) -> Tensor | None:
    """Inputs (M, K) times the codes of a weight (N, K), int8 both: int32 (M, N).

    None where the module does not take them.
    """
    module = load("cpu").found
    if module is None or not is_on() or torch.compiler.is_compiling():
        return None
    if not (is_plain(x, "cpu") and is_plain(codes, "cpu") and x.dtype == codes.dtype == torch.int8):
        return None
    (M, K), N = x.shape, codes.shape[0]
    if not 0 < K < MAX_CODES or codes.stride(1) != 1:
        return None
    x, sums = x.contiguous(), x.new_empty(M, N, dtype=torch.int32)
    at = codes.data_ptr(), codes.stride(0), sums.data_ptr()
    module.multiply_codes(isa(), (M, K, N), x.data_ptr(), *at, threads())
    return sums


log: logging.Logger = logging.getLogger("qload")

TABLE = "cpu_dispatch.json"
REGISTERS, CACHE, PAIRS, TORCH = "registers", "cache", "pairs", "torch"
WAYS = {"panels": (CACHE, REGISTERS, TORCH), "rows": (CACHE, TORCH), "eetq": (CACHE, PAIRS, TORCH)}
BYTE_TYPES: tuple[type[Weight], ...] = (BNBWeight, CTIntWeight, EETQWeight, Fp8Weight, MXFP8Weight)
NARROW_BITS, WIDE_BITS = 4, 8  # measured widths of codes in rows
Cell = tuple[str, int, str, str]  # kind, bits, type of the activations, instruction set
# Types of weights with a kernel; of some only the layers whose codes lie in rows.
TYPES: tuple[type[Weight], ...] = (PanelsWeight, *ROW_TYPES)

_advised: set[tuple[str, torch.dtype]] = set()  # formats and dtypes of activations with advice in the log
_refused: set[Any] = set()  # format, config and layer of weights without a form in panels


def kind_of(weight_type: type[Weight]) -> str:
    """Name of a type of weights in the table."""
    if issubclass(weight_type, PanelsWeight):
        return "panels"
    return "eetq" if issubclass(weight_type, EETQWeight) else "rows"


def row_bits(weight_type: type[Weight]) -> int:
    """Width of codes in rows of a type, as in the table."""
    return WIDE_BITS if issubclass(weight_type, BYTE_TYPES) else NARROW_BITS


@lru_cache(maxsize=4096)
def ranked(kind: str, bits: int, dtype: torch.dtype, isa: str, tokens: int) -> tuple[str, ...]:
    """Ways from the fastest on; in the order of `WAYS` without measurements."""
    rows = _rows_of_table(kind, bits, dtype, isa)
    above = [ways for most, ways in rows if tokens <= most]
    return above[0] if above else rows[-1][1] if rows else WAYS[kind]


def most_before_torch(kind: str, bits: int, dtype: torch.dtype, isa: str) -> int | None:
    """Largest number of tokens with the CPU module faster than torch; None: any number."""
    before = 0
    for most, ways in _rows_of_table(kind, bits, dtype, isa):
        if ways[0] == TORCH:
            return before
        before = most
    return None


def most_tokens(weight_type: type[Weight], panel_bits: int | None, dtype: torch.dtype) -> int | None:
    """`most_before_torch` of such weights on this CPU, which has the module."""
    return most_before_torch(kind_of(weight_type), panel_bits or row_bits(weight_type), dtype, isa())


def forget() -> None:
    """Read the table again after a change."""
    ranked.cache_clear()
    ROWS.clear()
    ROWS.update(_read())


def _rows_of_table(kind: str, bits: int, dtype: torch.dtype, isa: str) -> list[tuple[int, tuple[str, ...]]]:
    return ROWS.get((kind, bits, str(dtype).removeprefix("torch."), isa), [])


def _read() -> dict[Cell, list[tuple[int, tuple[str, ...]]]]:
    table: dict[Cell, list[tuple[int, tuple[str, ...]]]] = {}
    try:
        for row in json.loads(resources.files(__package__).joinpath(TABLE).read_text("utf-8")):
            cell = row["kind"], row["bits"], row["dtype"], row["isa"]
            table.setdefault(cell, []).append((row["tokens"], tuple(row["ways"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{__package__}/{TABLE}", "the table as it is installed", repr(error)) from error
    return {cell: sorted(rows) for cell, rows in table.items()}


ROWS = _read()  # at import: a compiled model cannot open files


def why_not(weight: Weight, dtype: torch.dtype) -> str | None:
    """Reason why the CPU module does not multiply activations of a `dtype` with a `weight`, or None."""
    module = load("cpu")
    if module.found is None:
        return f"the CPU module is {module.reason}"
    if dtype not in FLOATS:
        return f"needs activations of float32, float16 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    if 0 in weight.shape:
        return f"a weight of shape {weight.shape} has no elements"
    if isinstance(weight, PanelsWeight) or rows_of(weight) is not None:
        return None
    return f"no CPU kernel reads {type(weight).__name__}"


class CpuPlan(ABC):
    """Plan of products with one weight, valid while its tensors stay in place.

    It holds their memory, so that no other tensor can take their addresses.
    """

    def __init__(self, weight: Weight, bits: int) -> None:
        self.kind, self.bits = kind_of(type(weight)), bits
        self.N, self.K = weight.shape

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        tensors: Sequence[Tensor] = (),
        *,
        dtype: torch.dtype | None = None,
        few: int | None = None,
    ) -> Tensor | None:
        """(..., K) -> (..., N) in x's dtype, sums in float32; None: torch multiplies this call.

        `dtype`: dtype of the result, if not that of x; the fastest way that does not round to the type of x.
        `few`: number of tokens up to which codes in panels become floats in registers; None: by the table.
        """
        if x.dtype not in FLOATS or not x.ndim or x.shape[-1] != self.K or not is_on():
            return None
        if not is_plain(x, "cpu"):
            return None
        added = None
        if bias is not None:
            if tuple(bias.shape) != (self.N,) or not is_plain(bias, "cpu"):
                return None
            added = bias.detach().to(torch.float32).contiguous()
        rows, instructions = x.detach().reshape(-1, self.K), isa()
        ways = ranked(self.kind, self.bits, x.dtype, instructions, rows.shape[0])
        way = ways[0]
        if way == TORCH and dtype not in (None, x.dtype):
            way = next((each for each in ways if each != TORCH), TORCH)
        if way == TORCH:
            return None
        if rows.stride(1) != 1 and rows.shape[1] != 1:
            rows = rows.contiguous()
        y = self.product(way, rows, added, dtype, instructions, few)
        return None if y is None else y.view(*x.shape[:-1], self.N)

    @abstractmethod
    def product(
        self,
        way: str,
        x: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        instructions: str = "",
        few: int | None = None,
    ) -> Tensor | None:
        """Tokens (M, K) of stride 1 -> (M, N), by one way; `bias` in float32. None: the way is not for them.

        `instructions`: instruction set; "": the one in use.
        """


class PanelsPlan(CpuPlan):
    """Products with a weight in panels."""

    def __init__(self, weight: PanelsWeight) -> None:
        super().__init__(weight, weight.config.stored_bits)
        self._module = _module()
        self.memory = [tensor.detach() for tensor in weight.fields().values()]
        group, run = weight.config.rows_of_a_group(self.K), weight.config.run(self.K)
        self._sizes = self.K, self.N, weight.rows, group, run
        self._addresses = (
            address(weight.perm),
            address(weight.qweight),
            _typed(weight.scales),
            address(weight.zeros),
            weight.config.default_zero,
            (address(weight.offsets), weight.config.offset == "code"),
        )

    def product(
        self,
        way: str,
        x: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        instructions: str = "",
        few: int | None = None,
    ) -> Tensor:
        """As for every plan."""
        M = x.shape[0]
        if few is None:
            few = M if way == REGISTERS else 0
        y = x.new_empty(M, self.N, dtype=dtype)
        self._module.multiply(
            instructions or isa(), self.bits, (M, *self._sizes, x.stride(0)),
            (x.data_ptr(), FLOATS.index(x.dtype)), *self._addresses,
            0 if bias is None else bias.data_ptr(), (y.data_ptr(), FLOATS.index(y.dtype)), few, threads(),
        )  # fmt: skip
        return y


class RowsPlan(CpuPlan):
    """Products with a weight of codes in rows; `kept`: the rows of earlier calls."""

    def __init__(self, weight: Weight, kept: KeptRows) -> None:
        super().__init__(weight, row_bits(type(weight)))
        self.weight, self.kept = weight, kept

    def product(
        self,
        way: str,
        x: Tensor,
        bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
        instructions: str = "",
        few: int | None = None,
    ) -> Tensor | None:
        """As for every plan."""
        weight = self.weight
        if way == PAIRS and isinstance(weight, EETQWeight) and weight.weight.is_contiguous():
            sums = multiply_rows(inputs_of_pairs(x), rows_of_pairs(weight), None)
            return outputs_of_pairs(sums, weight.weight_scales, bias, dtype or x.dtype)
        codes = self.kept.of(weight)
        return None if codes is None else multiply_rows(x, codes, bias, dtype)


def plan_of(weight: Weight, kept: KeptRows | None = None) -> CpuPlan | None:
    """Plan of products with a weight; None without a kernel for its type and tensors.

    `kept`: the rows of earlier calls.
    """
    if not isinstance(weight, TYPES) or load("cpu").found is None or torch.compiler.is_compiling():
        return None
    tensors = weight.fields().values()
    if 0 in weight.shape or not all(is_plain(tensor, "cpu") for tensor in tensors):
        return None
    if not isinstance(weight, PanelsWeight):
        return RowsPlan(weight, KeptRows() if kept is None else kept)
    return PanelsPlan(weight) if all(tensor.is_contiguous() for tensor in tensors) else None


def multiply(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    kept: KeptRows | None = None,
    dtype: torch.dtype | None = None,
    few: int | None = None,
) -> Tensor | None:
    """(..., K) -> (..., N) as `CpuPlan.multiply`, by a plan of this call alone."""
    plan = plan_of(weight, kept)
    return None if plan is None else plan.multiply(x, bias, dtype=dtype, few=few)


def advise_panels(x: Tensor, weight: Weight) -> None:
    """Warn once of a format and a dtype of x (..., K) if panels multiply it faster than dequantizing does.

    For a call that `multiply` does not take, of a weight that its loader did not repack. Nothing is logged
    where the CPU module is missing or panels refuse the weight.
    """
    about = weight.format, x.dtype
    if about in _advised or load("cpu").found is None or not is_on() or torch.compiler.is_compiling():
        return
    bits, layer = getattr(weight.config, "bits", None), (weight.format, weight.config, weight.layer)
    if bits not in CODE_BITS or x.dtype not in FLOATS or 0 in weight.shape or layer in _refused:
        return
    if not all(is_plain(tensor, "cpu") for tensor in (x, *weight.fields().values())):
        return
    stored = PanelsConfig(bits, -1).stored_bits
    if ranked("panels", stored, x.dtype, isa(), x.numel() // x.shape[-1])[0] == TORCH:
        return
    if find_unsupported_panels(weight) is not None:
        _refused.add(layer)
        return
    _advised.add(about)
    log.warning(
        '%s: %s is dequantized for each product with %s on a CPU; target="auto" of open_checkpoint, or '
        'repack(weight, "panels"), stores it in the order of the CPU module, which is faster',
        weight.layer.name or "weight",
        weight.format,
        str(x.dtype).removeprefix("torch."),
    )


def multiply_rows(
    x: Tensor, codes: CodeRows, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Tokens (M, K) of stride 1 times codes in rows -> (M, N), by the module; `bias` in float32."""
    (M, K), N = x.shape, codes.bytes.shape[0]
    y = x.new_empty(M, N, dtype=dtype)
    values = values_of(codes.meaning, N, codes.high_first)
    scales = BYTE_SCALES.index(codes.meaning.scales.dtype), codes.second, codes.divided
    at = codes.bytes.data_ptr(), codes.bytes.stride(0), address(bias)
    _module().multiply_rows(
        isa(), codes.bits, (M, K, N, x.stride(0)), _typed(x), values, scales, *at, _typed(y), threads()
    )
    return y


def _typed(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), FLOATS.index(tensor.dtype)


def _module() -> ModuleType:
    module = load("cpu").found
    assert module is not None  # checked by `plan_of`
    return module
