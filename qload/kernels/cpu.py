"""x times a weight on a CPU, by the CPU module: codes become floats in registers, or in the cache.

Weights in panels: few tokens read each byte once and write it nowhere; for more tokens some rows of some
panels are spelled out and multiplied from the cache. Weights whose codes lie in rows are spelled out there
for any number of tokens (`qload.kernels.cpu_rows`). `csrc/cpu/product.h` says what is computed, and in which
order; the result has the same bits on any number of threads.
"""

import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qload.devices.cpu import values_of
from qload.devices.tensors import FLOATS, address, is_plain
from qload.formats import EETQWeight
from qload.kernel_formats.panels import CODE_BITS, PanelsConfig, PanelsWeight
from qload.kernel_formats.repack import find_unsupported_panels
from qload.kernels.cpu_choice import PAIRS, REGISTERS, TORCH, kind_of, most_before_torch, ranked, row_bits
from qload.kernels.cpu_eetq import inputs_of_pairs, outputs_of_pairs, rows_of_pairs
from qload.kernels.cpu_rows import BYTE_SCALES, ROW_TYPES, CodeRows, KeptRows, rows_of
from qload.native import is_on, isa, load, threads
from qload.spec import Weight

log: logging.Logger = logging.getLogger("qload")

TYPES: tuple[type[Weight], ...] = (
    PanelsWeight,
    *ROW_TYPES,
)  # of weights that are multiplied, if not every one

_advised: set[tuple[str, torch.dtype]] = set()  # formats and activations that the log has advice about
_refused: set[Any] = set()  # format, config and layer of weights that panels refuse


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
    if ways_of(PanelsWeight, stored, x.dtype, x.numel() // x.shape[-1])[0] == TORCH:
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


def why_not(weight: Weight, dtype: torch.dtype) -> str | None:
    """Why the CPU module does not multiply activations of a `dtype` with a `weight`, or None."""
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


def multiply(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    few: int | None = None,
    kept: KeptRows | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """(..., K) -> (..., N) in x's dtype, sums in float32; None where this module does not take the call.

    `reference.check` has nothing against the operands. `few`: up to so many tokens codes in panels become
    floats in registers; None: as the table says. `kept`: what earlier calls found out about this layer.
    `dtype`: of the result, if not that of x.
    """
    if load("cpu").found is None or not is_on() or torch.compiler.is_compiling():
        return None
    held = (x, *weight.fields().values(), *(() if bias is None else (bias,)))
    if x.dtype not in FLOATS or 0 in weight.shape or not all(is_plain(tensor, "cpu") for tensor in held):
        return None
    bits = weight.config.stored_bits if isinstance(weight, PanelsWeight) else None
    taken = _taken(x, type(weight), bits, dtype)
    if taken is None:
        return None
    added = None if bias is None else bias.detach().to(torch.float32).contiguous()
    y = by_way(*taken, weight, added, few, kept, dtype)
    return None if y is None else y.view(*x.shape[:-1], weight.shape[0])


def by_way(
    way: str,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    few: int | None = None,
    kept: KeptRows | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Tokens (M, K) of stride 1 -> (M, N), one way of `cpu_choice`, but torch's; None: not these tensors.

    `bias`: in float32. What `multiply` has checked is not checked again.
    """
    if isinstance(weight, PanelsWeight):
        if not all(tensor.is_contiguous() for tensor in weight.fields().values()):
            return None
        return PanelsPlan(weight).product(x, bias, _few(way, x) if few is None else few, dtype)
    if way == PAIRS and isinstance(weight, EETQWeight) and weight.weight.is_contiguous():
        sums = _rows(inputs_of_pairs(x), rows_of_pairs(weight), None)
        return outputs_of_pairs(sums, weight.weight_scales, bias, dtype or x.dtype)
    codes = rows_of(weight) if kept is None else kept.of(weight)
    return None if codes is None else _rows(x, codes, bias, dtype)


class PanelsPlan:
    """How activations are multiplied with panels: sizes, and where their tensors lie.

    It holds their memory, so that no other tensor comes to lie there as long as a call is planned for it.
    """

    def __init__(self, weight: PanelsWeight) -> None:
        self.memory = [tensor.detach() for tensor in weight.fields().values()]
        self.bits = weight.config.stored_bits
        self.N, self.K = weight.shape
        group, run = weight.config.rows_of_a_group(self.K), weight.config.run(self.K)
        self._sizes = self.K, self.N, weight.rows, group, run
        self._held = (
            address(weight.perm),
            address(weight.qweight),
            _typed(weight.scales),
            address(weight.zeros),
        )

    def multiply(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
        """`multiply` of activations whose K may be another; None where that has to see to it."""
        if x.dtype not in FLOATS or not x.ndim or x.shape[-1] != self.K or not is_on():
            return None
        if not is_plain(x, "cpu") or not (bias is None or _is_added(bias, self.N)):
            return None
        taken = _taken(x, PanelsWeight, self.bits, dtype)
        if taken is None:
            return None
        way, rows = taken
        added = None if bias is None else bias.to(torch.float32).contiguous()
        y = self.product(rows, added, _few(way, rows), dtype)
        return y.view(*x.shape[:-1], self.N)

    def product(self, x: Tensor, bias: Tensor | None, few: int, dtype: torch.dtype | None = None) -> Tensor:
        """Tokens (M, K) of stride 1 -> (M, N); `bias` in float32; `few`, `dtype`: as `multiply` has them."""
        here, M = isa(), x.shape[0]
        y = x.new_empty(M, self.N, dtype=dtype)
        sizes = (M, *self._sizes, x.stride(0))
        _module().multiply(
            here, self.bits, sizes, _typed(x), *self._held, address(bias), _typed(y), few, threads()
        )
        return y


def plan_of(weight: Weight) -> PanelsPlan | None:
    """A plan for calls with a weight, for as long as its tensors lie where they lie; None: there is none."""
    if not isinstance(weight, PanelsWeight) or load("cpu").found is None or 0 in weight.shape:
        return None
    held = weight.fields().values()
    plain = all(is_plain(tensor, "cpu") and tensor.is_contiguous() for tensor in held)
    return PanelsPlan(weight) if plain else None


def _taken(
    x: Tensor, weight_type: type[Weight], panel_bits: int | None, dtype: torch.dtype | None
) -> tuple[str, Tensor] | None:
    """The way of a call, and (..., K) as tokens (M, K) of stride 1; None where it is torch's.

    Torch's rounds to the type of x: where the result has another `dtype`, it is the fastest of the others.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    ways = ways_of(weight_type, panel_bits, x.dtype, rows.shape[0])
    way = ways[0] if dtype in (None, x.dtype) else next((each for each in ways if each != TORCH), TORCH)
    if way == TORCH:
        return None
    return way, rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def _few(way: str, x: Tensor) -> int:
    """Up to how many tokens codes in panels become floats in registers."""
    return x.shape[0] if way == REGISTERS else 0


def _is_added(bias: Tensor, N: int) -> bool:
    return tuple(bias.shape) == (N,) and is_plain(bias, "cpu")


def ways_of(
    weight_type: type[Weight], panel_bits: int | None, dtype: torch.dtype, tokens: int
) -> tuple[str, ...]:
    """How so many tokens are multiplied with weights of a type, the fastest way first.

    `panel_bits`: of those in panels.
    """
    return ranked(kind_of(weight_type), panel_bits or row_bits(weight_type), dtype, isa(), tokens)


def most_tokens(weight_type: type[Weight], panel_bits: int | None, dtype: torch.dtype) -> int | None:
    """Up to how many tokens of a `dtype` this module multiplies with such weights here; None: any number."""
    if load("cpu").found is None:
        return None
    bits = panel_bits or row_bits(weight_type)
    return most_before_torch(kind_of(weight_type), bits, dtype, isa())


def _rows(x: Tensor, codes: CodeRows, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
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
    found = load("cpu").found
    assert found is not None  # `multiply` has asked
    return found
