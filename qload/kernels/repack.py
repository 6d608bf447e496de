"""One weight, other layouts: `repack` says it in another one, `restore` brings it back bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from qload.errors import ArgumentError, RepackError
from qload.formats import (
    AWQConfig,
    AWQWeight,
    GPTQConfig,
    GPTQWeight,
    Marlin24Config,
    Marlin24Weight,
    MarlinConfig,
    MarlinWeight,
)
from qload.kernels import awq, exllama, marlin, marlin_24
from qload.kernels.exllama import ExllamaWeight
from qload.kernels.gptq import with_zeros
from qload.kernels.marlin import GPTQMarlinWeight
from qload.layouts import Stored, StoredMinusOne, ZeroPoints
from qload.spec import Weight

W = TypeVar("W", bound=Weight)

# Every layout is reached through GPTQ's codes and groups, which can say all the others.
_FROM_GPTQ: dict[str, tuple[type[Weight], Callable[[GPTQWeight], Weight]]] = {
    "gptq": (GPTQWeight, lambda weight: with_zeros(weight, StoredMinusOne())),
    "gptq_v2": (GPTQWeight, lambda weight: with_zeros(weight, Stored())),
    "awq": (AWQWeight, awq.from_gptq),
    "exllama": (ExllamaWeight, exllama.from_gptq),
    "marlin": (GPTQMarlinWeight, lambda weight: marlin.from_gptq(weight, _keeps_zeros(weight))),
    "marlin_24": (Marlin24Weight, marlin_24.from_gptq),
}
LAYOUTS = tuple(_FROM_GPTQ)

_TO_GPTQ: dict[type[Weight], Callable[[Any], GPTQWeight]] = {
    GPTQWeight: lambda weight: weight,
    AWQWeight: awq.to_gptq,
    ExllamaWeight: exllama.to_gptq,
    GPTQMarlinWeight: marlin.to_gptq,
    MarlinWeight: marlin.of_checkpoint,
    Marlin24Weight: marlin_24.to_gptq,
}

# Back to what a checkpoint stored, by the config it was loaded with.
_BACK: dict[type[Any], Callable[[GPTQWeight, Any], Weight]] = {
    GPTQConfig: lambda weight, config: with_zeros(weight, config.zeros),
    AWQConfig: lambda weight, config: awq.from_gptq(weight, config.zero_point),
    MarlinConfig: marlin.to_checkpoint,
    Marlin24Config: marlin_24.from_gptq,
}
_NEVER_STORED = (ExllamaWeight, GPTQMarlinWeight)  # what only kernels read


def repack(
    weight: Weight, layout: str, *, out: Weight | None = None, zeros: ZeroPoints | None = None
) -> Weight:
    """The same weight in another layout, as a typed weight with its own exact `dequantize()`.

    Parameters
    ----------
    weight
        A GPTQ, AWQ, ExLlama or Marlin weight, whole or a share.
    layout
        "gptq" (zero points stored minus one), "gptq_v2" (stored), "awq", "exllama", "marlin" (as its
        kernel reads it) or "marlin_24" (a weight that is 2:4 sparse).
    out
        A weight of the target's type and shapes, whose tensors are overwritten and returned.
    zeros
        How zero points are stored in "gptq" or "exllama", where it is not what the layout's name says:
        `StoredMinusOne()` takes 1 from whole words, `StoredMinusOnePerField()` from each field.

    Raises RepackError where the layout cannot say the weight, with the reason.
    """
    if layout not in _FROM_GPTQ:
        raise ArgumentError("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
    if zeros is not None and layout not in ("gptq", "exllama"):
        raise ArgumentError("zeros", "None, as only gptq and exllama have a choice", f"{zeros} for {layout}")
    target, make = _FROM_GPTQ[layout]
    origin = weight.layer.origin or weight.config
    if isinstance(weight, target) and target is not GPTQWeight and zeros is None:
        made: Weight = weight
    else:
        through = _relabel(_through(weight, layout), origin)
        if zeros is not None:
            through = with_zeros(through, zeros)
        made = through if zeros is not None and layout == "gptq" else make(through)
    back = type(made.config) is type(origin) and made.config == origin
    made = _apart(_relabel(made, None if back else origin), weight)
    return made if out is None else _into(out, made)


def restore(weight: Weight) -> Weight:
    """The checkpoint weight that was repacked, bit for bit; a weight that never was comes back as it is."""
    origin = weight.layer.origin
    if origin is None and not isinstance(weight, _NEVER_STORED):
        return weight
    through = _through(weight, "the checkpoint")
    back = _BACK.get(type(origin))
    return _apart(_relabel(back(through, origin) if back else through, None, origin), weight)


def targets(kind: type[Weight]) -> tuple[str, ...]:
    """The layouts that weights of a kind are repacked to; some of its weights may still be refused."""
    if kind not in _TO_GPTQ:
        return ()
    return tuple(
        layout for layout, (target, _) in _FROM_GPTQ.items() if target is not kind or kind is GPTQWeight
    )


def restores(kind: type[Weight]) -> bool:
    """Whether what weights of a kind were repacked to is taken back."""
    return kind in _TO_GPTQ


def _keeps_zeros(weight: GPTQWeight) -> bool:
    """AWQ's zero points go along even where all are 2**(bits - 1), as its kernels expect them."""
    origin = weight.layer.origin
    return isinstance(origin, AWQConfig) and origin.zero_point


def _through(weight: Weight, layout: str) -> GPTQWeight:
    to_gptq = _TO_GPTQ.get(type(weight))
    if to_gptq is None:
        raise RepackError(weight.format, layout, f"{type(weight).__name__} has no codes to repack")
    return to_gptq(weight)


def _relabel(weight: W, origin: Any, config: Any = None) -> W:
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
