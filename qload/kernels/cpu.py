"""Products of x and a weight by the CPU module: codes become floats in registers, or in the cache.

Few tokens read each byte of panels once and write it nowhere; for more tokens some rows of some panels are
dequantized in the cache and multiplied there. Codes in rows are dequantized there for any number of tokens
(`qload.kernels.cpu_rows`). `csrc/cpu/product.h` defines the result and the order of its sums: the same bits
on any number of threads.

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
from functools import lru_cache
from importlib import resources
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qload.devices.cpu import values_of
from qload.devices.tensors import FLOATS, address, is_plain
from qload.errors import ArgumentError
from qload.formats import BNBWeight, CTIntWeight, EETQWeight, Fp8Weight, MXFP8Weight
from qload.kernel_formats.panels import CODE_BITS, PanelsConfig, PanelsWeight
from qload.kernel_formats.repack import find_unsupported_panels
from qload.kernels.cpu_rows import (
    BYTE_SCALES,
    ROW_TYPES,
    CodeRows,
    KeptRows,
    inputs_of_pairs,
    outputs_of_pairs,
    rows_of,
    rows_of_pairs,
)
from qload.native import is_on, isa, load, threads
from qload.spec import Weight

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
    """`most_before_torch` of such weights on this CPU; None as well without the module."""
    if load("cpu").found is None:
        return None
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
    stored = PanelsConfig(bits, -1, zero_point=True).stored_bits
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
