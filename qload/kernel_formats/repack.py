"""One weight, other layouts: `repack` says it in another one, `restore` brings it back bit for bit.

Every kind of weight is read into one of three meanings (integer codes in plain order, EXL2, FP8), and every
layout is written from one. Nothing else here knows a kind or a layout by name.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from qload.errors import ArgumentError, RepackError
from qload.formats import (
    AWQWeight,
    CTPackWeight,
    Exl2Weight,
    Fp8Weight,
    GPTQWeight,
    Marlin24Weight,
    MarlinWeight,
)
from qload.kernel_formats import awq, compressed, exl2, exllama, fp8_marlin, gptq, marlin, marlin_24, strips
from qload.kernel_formats.exl2 import Exl2KernelWeight
from qload.kernel_formats.exllama import ExllamaWeight
from qload.kernel_formats.fp8_marlin import FP8MarlinWeight
from qload.kernel_formats.integers import Integers, Origin
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.strips import StripsWeight
from qload.layouts import Stored, StoredMinusOne, ZeroPoints
from qload.spec import Weight

W = TypeVar("W", bound=Weight)


@dataclass(frozen=True)
class Kind:
    """What a kind of weight is read into, and how; `bulk`: its tensor whose values decide nothing, or ""."""

    meaning: type[Any]
    read: Callable[[Any], Any] = lambda weight: weight
    back: Callable[[Any, Origin], Weight] | None = None  # None: what only kernels read
    bulk: Callable[[Any], str] = lambda weight: ""


@dataclass(frozen=True)
class Way:
    """From a meaning to a layout: the type that is made, the options it takes, and how."""

    made: type[Weight]
    write: Callable[..., Weight]
    options: tuple[str, ...] = ()
    looks_at_codes: bool = False  # to decide what it refuses


KINDS: dict[type[Weight], Kind] = {
    GPTQWeight: Kind(Integers, gptq.read, gptq.back, lambda _: "qweight"),
    AWQWeight: Kind(Integers, awq.read, awq.back, lambda _: "qweight"),
    CTPackWeight: Kind(Integers, compressed.read, compressed.back, compressed.bulk),
    MarlinWeight: Kind(Integers, marlin.read_checkpoint, marlin.back_to_checkpoint, lambda _: "B"),
    Marlin24Weight: Kind(Integers, marlin_24.read, marlin_24.back),
    ExllamaWeight: Kind(Integers, exllama.read),
    GPTQMarlinWeight: Kind(Integers, marlin.read),
    StripsWeight: Kind(Integers, marlin.read),
    Exl2Weight: Kind(Exl2Weight, back=lambda weight, _: weight, bulk=lambda _: "q_weight"),
    Exl2KernelWeight: Kind(Exl2Weight, exl2.to_exl2),
    Fp8Weight: Kind(Fp8Weight, back=lambda weight, _: weight, bulk=lambda _: "weight"),
    FP8MarlinWeight: Kind(Fp8Weight, fp8_marlin.read),
}

WAYS: dict[tuple[type[Any], str], Way] = {
    (Integers, "gptq"): Way(
        GPTQWeight, lambda integers, zeros: gptq.write(integers, zeros or StoredMinusOne()), ("zeros",)
    ),
    (Integers, "gptq_v2"): Way(GPTQWeight, lambda integers: gptq.write(integers, Stored())),
    (Integers, "awq"): Way(AWQWeight, awq.write),
    (Integers, "exllama"): Way(ExllamaWeight, exllama.write, ("zeros",)),
    (Integers, "marlin"): Way(
        GPTQMarlinWeight, lambda integers: marlin.write(integers, integers.origin.keeps_zeros)
    ),
    (Integers, "strips"): Way(
        StripsWeight, lambda integers: strips.write(integers, integers.origin.keeps_zeros)
    ),
    (Integers, "marlin_24"): Way(Marlin24Weight, marlin_24.write, looks_at_codes=True),
    (Exl2Weight, "exllama"): Way(Exl2KernelWeight, exl2.from_exl2),
    (Fp8Weight, "marlin"): Way(FP8MarlinWeight, fp8_marlin.write, ("dtype", "exponent_bias", "whole")),
}
LAYOUTS = tuple(dict.fromkeys(layout for _, layout in WAYS))


def repack(
    weight: Weight,
    layout: str,
    *,
    out: Weight | None = None,
    zeros: ZeroPoints | None = None,
    dtype: torch.dtype | None = None,
    exponent_bias: bool | None = None,
    whole: Weight | None = None,
) -> Weight:
    """The same weight in another layout, as a typed weight with its own exact `dequantize()`.

    Parameters
    ----------
    weight
        A weight that `targets` knows a layout for, whole or a share.
    layout
        "gptq" (zero points stored minus one), "gptq_v2" (stored), "awq", "exllama" and "marlin" (as their
        kernels read them), "strips" (as our kernel for few tokens does) or "marlin_24" (a weight that is 2:4
        sparse).
    out
        A weight of the target's type and shapes, whose tensors are overwritten and returned.
    zeros
        How zero points are stored in "gptq" or "exllama", where it is not what the layout's name says:
        `StoredMinusOne()` takes 1 from whole words, `StoredMinusOnePerField()` from each field.
    dtype, exponent_bias
        Of FP8 for "marlin", and needed there: float16 or bfloat16, as the activations; whether scales carry
        the factor of the exponent (vLLM's kernel) or the kernel applies it (TGI's).
    whole
        The layer that the weight is a share of, whose facts then decide what is left out or refused, on
        every rank alike. Its codes are not looked at, but for "marlin_24".

    Raises RepackError where the layout cannot say the weight, with the reason.
    """
    for argument, given in {"weight": weight, "out": out, "whole": whole}.items():
        if given is not None or argument == "weight":
            _check_typed(argument, given)
    if layout not in LAYOUTS:
        raise ArgumentError("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
    kind, way = _kind(weight, layout), _way(weight, layout)
    if whole is not None and _kind(whole, layout).meaning is not kind.meaning:
        raise ArgumentError("whole", f"the layer that the {weight.format} weight is of", whole.format)
    asked = {"zeros": zeros, "dtype": dtype, "exponent_bias": exponent_bias}
    for option, value in asked.items():
        if value is not None and option not in way.options:
            raise ArgumentError(option, _takers(option), f"{value} for {weight.format} to {layout}")
    if not isinstance(zeros, ZeroPoints | None):
        raise ArgumentError("zeros", "None, or such as StoredMinusOne()", repr(zeros))
    chosen = any(value is not None for value in asked.values())
    if isinstance(weight, way.made) and way.made is not GPTQWeight and not chosen:
        made: Weight = weight
    else:
        meant = None if whole is None else _kind(whole, layout).read(whole)  # which refuses for every rank
        meaning = kind.read(weight)
        if isinstance(meaning, Integers):
            room = out if type(out) is way.made and not _share(out, weight) else None
            meaning = replace(meaning, whole=meant, out=room)
        asked["whole"] = meant
        made = way.write(meaning, **{option: asked[option] for option in way.options})
    made = _apart(_relabel(made, _origin(made)), weight)
    return made if out is None else _into(out, made)


def restore(weight: Weight) -> Weight:
    """The checkpoint weight that was repacked, bit for bit; a weight that never was comes back as it is.

    A kernel's integers that were made by hand come back as GPTQ.
    """
    _check_typed("weight", weight)
    origin, kind = weight.layer.origin, KINDS.get(type(weight))
    if kind is None or (origin is None and kind.back is not None):
        return weight
    meaning = kind.read(weight)
    if not isinstance(origin, Origin):
        made = gptq.write(meaning, meaning.convention) if isinstance(meaning, Integers) else meaning
    else:
        back = KINDS[origin.kind].back
        assert back is not None  # of what only kernels read, `_origin` leaves none
        made = replace(back(meaning, origin), config=origin.config)
    return _apart(_relabel(made, None), weight)


def targets(kind: type[Weight]) -> tuple[str, ...]:
    """The layouts that weights of a kind are repacked to; some of its weights may still be refused."""
    meaning = KINDS[kind].meaning if kind in KINDS else None
    return tuple(
        layout
        for (source, layout), way in WAYS.items()
        if source is meaning and (way.made is not kind or kind is GPTQWeight)
    )


def restores(kind: type[Weight]) -> bool:
    """Whether what weights of a kind were repacked to is taken back."""
    return kind in KINDS


def options(kind: type[Weight], layout: str) -> tuple[str, ...]:
    """Which options `repack` takes for a kind of weight and a layout."""
    way = WAYS.get((KINDS[kind].meaning, layout)) if kind in KINDS else None
    return way.options if way else ()


def undecisive(weight: Weight, layout: str) -> str:
    """The tensor whose values do not decide what is refused or left out; "" where all do."""
    kind = KINDS.get(type(weight))
    way = WAYS.get((kind.meaning, layout)) if kind else None
    return "" if kind is None or way is None or way.looks_at_codes else kind.bulk(weight)


def _check_typed(argument: str, given: object) -> None:
    if not isinstance(given, Weight):
        raise ArgumentError(argument, "a typed weight, as loaders return", type(given).__name__)


def _kind(weight: Weight, layout: str) -> Kind:
    if type(weight) not in KINDS:
        raise RepackError(weight.format, layout, f"{type(weight).__name__} has no codes to repack")
    return KINDS[type(weight)]


def _way(weight: Weight, layout: str) -> Way:
    way = WAYS.get((_kind(weight, layout).meaning, layout))
    if way is None:
        known = ", ".join(targets(type(weight)))
        raise RepackError(weight.format, layout, f"{weight.format} is repacked to {known}, and nothing else")
    return way


def _takers(option: str) -> str:
    """Who takes an option, for messages."""
    found = {
        f"{layout}" if meaning is Integers else f"{meaning.format} to {layout}"
        for (meaning, layout), way in WAYS.items()
        if option in way.options
    }
    return f"None, as only {' and '.join(sorted(found, reverse=True))} have a choice"


def _origin(made: Weight) -> Origin | None:
    """What a repacked weight goes back to; None where it is that again, or was only a kernel's by hand."""
    origin = made.layer.origin
    if not isinstance(origin, Origin) or KINDS[origin.kind].back is None:
        return None
    return None if type(made) is origin.kind and made.config == origin.config else origin


def _relabel(weight: W, origin: Origin | None) -> W:
    return replace(weight, layer=replace(weight.layer, origin=origin))


def _apart(made: W, source: Weight) -> W:
    """No tensor in common: whoever overwrites the one, as `out` does, must not change the other."""
    places = {tensor.data_ptr() for tensor in source.fields().values()}
    return made.holding({n: t.clone() for n, t in made.fields().items() if t.data_ptr() in places})


def _share(out: Weight, source: Weight) -> bool:
    """Whether writing to the one would change the other."""
    held, given = ({t.untyped_storage().data_ptr() for t in w.fields().values()} for w in (out, source))
    return bool(held & given)


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
