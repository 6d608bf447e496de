"""One weight, other layouts: `repack` says it in another one, `restore` brings it back bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qload.errors import ArgumentError, RepackError
from qload.formats import AWQConfig, AWQWeight, GPTQConfig, GPTQWeight
from qload.kernels import awq, exllama
from qload.kernels.exllama import ExllamaWeight
from qload.layouts import Stored, StoredMinusOne, ZeroPoints, gptq
from qload.spec import Weight

# Every layout is reached through GPTQ's codes and groups, which can say all the others.
_FROM_GPTQ: dict[str, Callable[[GPTQWeight], Weight]] = {
    "gptq": lambda weight: _with_zeros(weight, StoredMinusOne()),
    "gptq_v2": lambda weight: _with_zeros(weight, Stored()),
    "awq": awq.from_gptq,
    "exllama": exllama.from_gptq,
}
LAYOUTS = tuple(_FROM_GPTQ)


def repack(weight: Weight, layout: str, *, out: Weight | None = None) -> Weight:
    """The same weight in another layout, as a typed weight with its own exact `dequantize()`.

    Parameters
    ----------
    weight
        A GPTQ, AWQ or ExLlama weight, whole or a share.
    layout
        "gptq" (zero points stored minus one), "gptq_v2" (stored), "awq" or "exllama".
    out
        A weight of the target's type and shapes, whose tensors are overwritten and returned.

    Raises RepackError where the layout cannot say the weight, with the reason.
    """
    if layout not in _FROM_GPTQ:
        raise ArgumentError("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
    made = _same(weight, layout) or _FROM_GPTQ[layout](_to_gptq(weight, layout))
    origin = weight.layer.origin or weight.config
    back = type(made.config) is type(origin) and made.config == origin
    made = _apart(_relabel(made, None if back else origin), weight)
    return made if out is None else _into(out, made)


def restore(weight: Weight) -> Weight:
    """The checkpoint weight that was repacked, bit for bit; a weight that never was comes back as it is."""
    origin = weight.layer.origin
    if origin is None and not isinstance(weight, ExllamaWeight):
        return weight
    through = _to_gptq(weight, "the checkpoint")
    made: Weight = through
    if isinstance(origin, AWQConfig):
        made = awq.from_gptq(through)
    elif isinstance(origin, GPTQConfig):
        made = _with_zeros(through, origin.zeros)
    return _apart(_relabel(made, None, origin), weight)


def _same(weight: Weight, layout: str) -> Weight | None:
    return weight if weight.format == layout and not isinstance(weight, GPTQWeight) else None


def _to_gptq(weight: Weight, layout: str) -> GPTQWeight:
    if isinstance(weight, GPTQWeight):
        return weight
    if isinstance(weight, ExllamaWeight):
        return exllama.to_gptq(weight)
    if isinstance(weight, AWQWeight):
        return awq.to_gptq(weight, StoredMinusOne() if layout == "gptq" else Stored())
    raise RepackError(weight.format, layout, f"{type(weight).__name__} has no codes to repack")


def _with_zeros(weight: GPTQWeight, zeros: ZeroPoints) -> GPTQWeight:
    if weight.config.zeros == zeros:
        return weight
    packing = gptq.columns(weight.config.bits)
    logical = weight.config.zeros.read(weight.qzeros, packing)
    highest, limit = int(logical.max()), 2**weight.config.bits - 1
    if highest > limit:
        raise RepackError("gptq", f"zero points {zeros.name}", f"a zero point of {highest} is above {limit}")
    return replace(weight, config=replace(weight.config, zeros=zeros), qzeros=zeros.write(logical, packing))


def _relabel(weight: Weight, origin: Any, config: Any = None) -> Weight:
    return replace(weight, config=config or weight.config, layer=replace(weight.layer, origin=origin))


def _apart(made: Weight, source: Weight) -> Weight:
    """No tensor in common: whoever overwrites the one, as `out` does, must not change the other."""
    places = {tensor.data_ptr() for tensor in source.fields().values()}
    return made.holding({n: t.clone() for n, t in made.fields().items() if t.data_ptr() in places})


def _into(out: Weight, made: Weight) -> Weight:
    held, fresh = out.fields(), made.fields()
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in fresh.items()}
    got = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    if type(out) is not type(made) or wanted != got:
        raise ArgumentError(
            "out", f"a {type(made).__name__} with {wanted}", f"a {type(out).__name__} with {got}"
        )
    for name, tensor in held.items():
        tensor.copy_(fresh[name])
    return made.holding(held)
