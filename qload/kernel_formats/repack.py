"""One weight, other layouts: `repack` says it in another one, `restore` brings it back bit for bit.

Every type of weight is read into one of four meanings (integer codes in plain order, EXL2, FP8, FP4), and
every layout is written from one. Nothing else here knows a type or a layout by name.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from qload import devices
from qload.errors import ArgumentError, RepackError, checked
from qload.formats import (
    AWQWeight,
    CTPackWeight,
    Exl2Weight,
    Fp8Weight,
    GPTQWeight,
    Marlin24Weight,
    MarlinWeight,
)
from qload.kernel_formats import (
    awq,
    compressed_tensors,
    exl2,
    exllama,
    fp4_marlin,
    fp8_marlin,
    gptq,
    marlin,
    marlin_24,
    panels,
    strips,
)
from qload.kernel_formats.exl2 import Exl2KernelWeight
from qload.kernel_formats.exllama import ExllamaWeight
from qload.kernel_formats.fp4_marlin import VLLM_0_11, VLLM_0_33, Fp4, Fp4MarlinVllm033Weight, Fp4MarlinWeight
from qload.kernel_formats.fp8_marlin import Fp8MarlinWeight
from qload.kernel_formats.marlin import GPTQMarlinWeight
from qload.kernel_formats.panels import PanelsWeight
from qload.kernel_formats.plain_integers import Integers, Origin
from qload.kernel_formats.strips import StripsWeight
from qload.layouts import Stored, StoredMinusOne, ZeroPoints
from qload.spec import ActivationScheme, Weight
from qload.spec.weight import tensor_names

W = TypeVar("W", bound=Weight)


def apart(made: W, source: Weight) -> W:
    """No tensor in common: whoever overwrites the one, as `out` does, must not change the other."""
    places = {tensor.data_ptr() for tensor in source.fields().values()}
    return made.holding({n: t.clone() for n, t in made.fields().items() if t.data_ptr() in places})


def share_memory(out: Weight, source: Weight) -> bool:
    """Whether writing to the one would change the other."""
    held, given = ({t.untyped_storage().data_ptr() for t in w.fields().values()} for w in (out, source))
    return bool(held & given)


def written(out: Weight, made: W, writes: Iterable[Callable[[], object]]) -> W:
    """What was made, in the tensors of `out`; ArgumentError, and nothing written, where they do not fit.

    `made` may hold tensors of `out` already, which `writes` fill.
    """
    held, fresh = out.fields(), made.fields()
    wanted, got = _described(made), _described(out)
    if type(out) is not type(made) or wanted != got:
        raise ArgumentError("out", f"{type(made).__name__} with {wanted}", f"{type(out).__name__} with {got}")
    for name, tensor in held.items():
        devices.check_writable(tensor, f"out: {name}")
    _check_apart(held)
    for write in writes:
        write()
    for name, tensor in held.items():
        if tensor is not fresh[name]:
            tensor.copy_(fresh[name])
    return made.holding(held)


def _check_apart(held: Mapping[str, Tensor]) -> None:
    """No tensor in one piece begins inside of another, or ArgumentError."""
    whole = [(t.data_ptr(), t.nbytes, name) for name, t in held.items() if t.is_contiguous() and t.numel()]
    for (start, size, name), (following, _, other) in pairwise(sorted(whole)):
        if 0 < following < start + size:
            raise ArgumentError(
                "out", "tensors with memory of their own", f"{name} and {other} in one memory"
            )


def _described(weight: Weight) -> dict[str, str]:
    """Of each tensor its dtype, shape and device, for messages."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
        for name, tensor in weight.fields().items()
    }


SCALES_OF_INPUTS = ("input_scale", "input_global_scale")  # one scale, by the names that formats have for it


@dataclass(frozen=True)
class Reader:
    """What a type of weight is read into, and how.

    `skippable`: the tensor whose values decide nothing, or "". `ordered`: whether the config says that groups
    lie in order, as a loader found it in their index.
    """

    meaning: type[Any]
    read: Callable[[Any], Any] = lambda weight: weight
    back: Callable[[Any, Origin], Weight] | None = None  # None: what only kernels read
    skippable: Callable[[Any], str] = lambda weight: ""
    ordered: Callable[[Any], bool] = lambda weight: False


@dataclass(frozen=True)
class Writer:
    """From a meaning to a layout: the type that is made, the options it takes, and how."""

    made: type[Weight]
    write: Callable[..., Weight]
    options: tuple[str, ...] = ()
    looks_at_codes: bool = False  # to decide what it refuses


READERS: dict[type[Weight], Reader] = {
    GPTQWeight: Reader(Integers, gptq.read, gptq.back, lambda _: "qweight", gptq.is_ordered),
    AWQWeight: Reader(Integers, awq.read, awq.back, lambda _: "qweight"),
    CTPackWeight: Reader(Integers, compressed_tensors.read, compressed_tensors.back, compressed_tensors.bulk),
    MarlinWeight: Reader(Integers, marlin.read_checkpoint, marlin.back_to_checkpoint, lambda _: "B"),
    Marlin24Weight: Reader(Integers, marlin_24.read, marlin_24.back),
    ExllamaWeight: Reader(Integers, exllama.read),
    GPTQMarlinWeight: Reader(Integers, marlin.read),
    StripsWeight: Reader(Integers, marlin.read),
    PanelsWeight: Reader(Integers, panels.read),
    Exl2Weight: Reader(Exl2Weight, back=lambda weight, _: weight, skippable=lambda _: "q_weight"),
    Exl2KernelWeight: Reader(Exl2Weight, exl2.to_exl2),
    Fp8Weight: Reader(Fp8Weight, back=lambda weight, _: weight, skippable=lambda _: "weight"),
    Fp8MarlinWeight: Reader(Fp8Weight, fp8_marlin.read),
    **{
        weight_type: Reader(Fp4, fp4_marlin.read_fp4, fp4_marlin.restore_fp4, fp4_marlin.packed_name)
        for weight_type in fp4_marlin.NAMES
    },
    Fp4MarlinWeight: Reader(Fp4, fp4_marlin.read),
    Fp4MarlinVllm033Weight: Reader(Fp4, fp4_marlin.read),
}

WRITERS: dict[tuple[type[Any], str], Writer] = {
    (Integers, "gptq"): Writer(
        GPTQWeight, lambda integers, zeros: gptq.write(integers, zeros or StoredMinusOne()), ("zeros",)
    ),
    (Integers, "gptq_v2"): Writer(GPTQWeight, lambda integers: gptq.write(integers, Stored())),
    (Integers, "awq"): Writer(AWQWeight, awq.write),
    (Integers, "exllama"): Writer(ExllamaWeight, exllama.write, ("zeros",)),
    (Integers, "marlin"): Writer(
        GPTQMarlinWeight, lambda integers: marlin.write(integers, integers.origin.keeps_zeros)
    ),
    (Integers, "strips"): Writer(
        StripsWeight, lambda integers: strips.write(integers, integers.origin.keeps_zeros)
    ),
    (Integers, "panels"): Writer(
        PanelsWeight, lambda integers: panels.write(integers, integers.origin.keeps_zeros)
    ),
    (Integers, "marlin_24"): Writer(Marlin24Weight, marlin_24.write, looks_at_codes=True),
    (Exl2Weight, "exllama"): Writer(Exl2KernelWeight, exl2.from_exl2),
    (Fp8Weight, "marlin"): Writer(Fp8MarlinWeight, fp8_marlin.write, ("dtype", "exponent_bias", "whole")),
    (Fp4, "marlin"): Writer(Fp4MarlinWeight, fp4_marlin.write, ("dtype", "whole")),
    (Fp4, VLLM_0_11.layout): Writer(Fp4MarlinWeight, fp4_marlin.write, ("dtype", "whole")),
    (Fp4, VLLM_0_33.layout): Writer(Fp4MarlinVllm033Weight, fp4_marlin.write_vllm_0_33, ("dtype", "whole")),
}
LAYOUTS = tuple(dict.fromkeys(layout for _, layout in WRITERS))


@checked
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

    RepackError where the layout cannot say the weight, with the reason; CastError where it would lose a scale
    of FP8; ArgumentError for an option that it does not take, or an `out` that does not fit.

    Parameters
    ----------
    weight
        A weight that `targets` knows a layout for, whole or a share.
    layout
        "gptq" (zero points stored minus one), "gptq_v2" (stored), "awq", "exllama" and "marlin" (as their
        kernels read them), "strips" (as our kernel for few tokens does), "panels" (as our kernels for CPUs
        do), "marlin_24" (a weight that is 2:4 sparse), or of NVFP4 and MXFP4 "marlin_vllm_0_33" and
        "marlin_vllm_0_11" (for the Marlin kernel of that version of vLLM; "marlin" is the latter).
    out
        A weight of the target's type and shapes, whose tensors are overwritten and returned; none is
        written to where anything is refused.
    zeros
        How zero points are stored in "gptq" or "exllama", where it is not what the layout's name says:
        `StoredMinusOne()` takes 1 from whole words, `StoredMinusOnePerField()` from each field.
    dtype
        Of the activations, float16 or bfloat16; of FP8, NVFP4 and MXFP4 for the orders of Marlin, and needed
        there.
    exponent_bias
        Of FP8 for "marlin", and needed there: whether scales carry the factor of the exponent (vLLM's kernel)
        or the kernel applies it (TGI's).
    whole
        The layer that the weight is a share of, whose facts then decide what is left out or refused, on
        every rank alike. Its codes are not looked at, but for "marlin_24".

    Examples
    --------
    >>> import torch
    >>> from qload import AWQConfig, AWQWeight, repack
    >>> words, scales = torch.arange(512).int().reshape(64, 8), torch.ones(2, 64).half()
    >>> awq = AWQWeight(config=AWQConfig(32), qweight=words, qzeros=words[:2], scales=scales)
    >>> torch.equal(repack(awq, "gptq_v2").dequantize(), awq.dequantize())
    True
    """
    _check_layout(layout)
    weight.check_values()
    reader, writer = _reader(weight, layout), _writer(weight, layout)
    if whole is not None and _reader(whole, layout).meaning is not reader.meaning:
        raise ArgumentError("whole", f"the layer that the {weight.format} weight is of", whole.format)
    options_given = {"zeros": zeros, "dtype": dtype, "exponent_bias": exponent_bias}
    for option, value in options_given.items():
        if value is not None and option not in writer.options:
            raise ArgumentError(option, _takers(option), f"{value} for {weight.format} to {layout}")
    made, writes = _made(weight, layout, options_given, whole, out)
    return made if out is None else written(out, made, writes)


def repack_as_loaded(weight: Weight, layout: str, whole: Weight | None = None) -> Weight:
    """As `repack`, of what a loader has read just now, whose config tells what its index holds."""
    _check_layout(layout)
    return _made(weight, layout, {}, whole, loaded=True)[0]


def _made(
    weight: Weight,
    layout: str,
    options_given: Mapping[str, Any],
    whole: Weight | None,
    out: Weight | None = None,
    loaded: bool = False,
) -> tuple[Weight, list[Callable[[], object]]]:
    """The weight in a layout, and what is to be written to `out` when nothing can be refused any more."""
    reader, writer = _reader(weight, layout), _writer(weight, layout)
    chosen = any(value is not None for value in options_given.values())
    writes: list[Callable[[], object]] = []
    if type(weight) is writer.made and writer.made is not GPTQWeight and not chosen:
        made: Weight = weight
    else:
        meant = None if whole is None else _reader(whole, layout).read(whole)  # which refuses for every rank
        meaning = reader.read(weight)
        if isinstance(meaning, Integers):
            destination = out if type(out) is writer.made and not share_memory(out, weight) else None
            ordered = loaded and reader.ordered(weight)
            if meant is not None or destination is not None or ordered:
                meaning = replace(meaning, whole=meant, out=destination, known_in_order=ordered)
            writes = meaning.writes
        given = {**options_given, "whole": meant}
        made = writer.write(meaning, **{option: given.get(option) for option in writer.options})
    return apart(_relabel(made, _origin(made)), weight), writes


@checked
def restore(weight: Weight) -> Weight:
    """The checkpoint weight that was repacked, bit for bit; a weight that never was comes back as it is.

    A kernel's integers that were made by hand come back as GPTQ. `weight`: what `repack`, or a loader that
    repacks, returned.

    Examples
    --------
    >>> import torch
    >>> from qload import AWQConfig, AWQWeight, repack, restore
    >>> words, scales = torch.arange(512).int().reshape(64, 8), torch.ones(2, 64).half()
    >>> awq = AWQWeight(config=AWQConfig(32), qweight=words, qzeros=words[:2], scales=scales)
    >>> torch.equal(restore(repack(awq, "marlin")).qweight, awq.qweight)
    True
    """
    origin, reader = weight.layer.origin, READERS.get(type(weight))
    if reader is None or (origin is None and reader.back is not None):
        return weight
    meaning = reader.read(weight)
    if not isinstance(origin, Origin):
        made = gptq.write(meaning, meaning.convention) if isinstance(meaning, Integers) else meaning
    else:
        back = READERS[origin.weight_type].back
        assert back is not None  # of what only kernels read, `_origin` leaves none
        made = replace(back(meaning, origin), config=origin.config)
    return apart(_relabel(made, None), weight)


def targets(weight_type: type[Weight]) -> tuple[str, ...]:
    """The layouts that weights of a type are repacked to; some of its weights may still be refused."""
    meaning = READERS[weight_type].meaning if weight_type in READERS else None
    return tuple(
        layout
        for (source, layout), writer in WRITERS.items()
        if source is meaning and (writer.made is not weight_type or weight_type is GPTQWeight)
    )


def restores(weight_type: type[Weight]) -> bool:
    """Whether what weights of a type were repacked to is taken back."""
    return weight_type in READERS


def made(weight_type: type[Weight], layout: str) -> type[Weight] | None:
    """The type that weights of a type become in a layout; None where they do not."""
    writer = WRITERS.get((READERS[weight_type].meaning, layout)) if weight_type in READERS else None
    return writer.made if writer else None


def options(weight_type: type[Weight], layout: str) -> tuple[str, ...]:
    """Which options `repack` takes for a type of weight and a layout."""
    writer = WRITERS.get((READERS[weight_type].meaning, layout)) if weight_type in READERS else None
    return writer.options if writer else ()


def why_not_panels(weight: Weight) -> str | None:
    """Why a weight in the order of its checkpoint is not repacked to panels, or None; codes are not read.

    The reasons are those of `target="auto"` on a CPU.
    """
    reader = READERS.get(type(weight))
    if reader is None or reader.meaning is not Integers or reader.back is None:
        return f"{weight.format} is not repacked to panels"
    if isinstance(weight, Marlin24Weight):
        return "2:4 sparse weights stay as they are stored"
    try:
        return panels.refusal(reader.read(weight))
    except RepackError as error:
        return error.reason


def skippable_tensor(weight: Weight, layout: str) -> str:
    """The tensor whose values do not decide what is refused or left out; "" where all do."""
    reader = READERS.get(type(weight))
    writer = WRITERS.get((reader.meaning, layout)) if reader else None
    return "" if reader is None or writer is None or writer.looks_at_codes else reader.skippable(weight)


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ArgumentError("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))


def _reader(weight: Weight, layout: str) -> Reader:
    if type(weight) not in READERS:
        raise RepackError(weight.format, layout, f"{type(weight).__name__} has no codes to repack")
    return READERS[type(weight)]


def _writer(weight: Weight, layout: str) -> Writer:
    writer = WRITERS.get((_reader(weight, layout).meaning, layout))
    if writer is None:
        known = ", ".join(targets(type(weight)))
        raise RepackError(weight.format, layout, f"{weight.format} is repacked to {known}, and nothing else")
    return writer


def _takers(option: str) -> str:
    """Who takes an option, for messages."""
    found = {
        f"{layout}" if meaning is Integers else f"{meaning.format} to {layout}"
        for (meaning, layout), writer in WRITERS.items()
        if option in writer.options
    }
    return f"None, as only {' and '.join(sorted(found, reverse=True))} have a choice"


def _origin(made: Weight) -> Origin | None:
    """What a repacked weight goes back to; None where it is that again, or was only a kernel's by hand."""
    origin = made.layer.origin
    if not isinstance(origin, Origin) or READERS[origin.weight_type].back is None:
        return None
    return None if type(made) is origin.weight_type and made.config == origin.config else origin


def _relabel(weight: W, origin: Origin | None) -> W:
    layer = weight.layer.with_origin(origin, _renamed(weight))
    tensors = {name: getattr(weight, name) for name in tensor_names(type(weight))}
    return type(weight).unchecked(weight.config, layer, tensors)


def _renamed(weight: Weight) -> ActivationScheme | None:
    """How inputs are quantized, by the name that this format has for their stored scale."""
    scheme, held = weight.activations, weight.fields()
    if scheme is None or scheme.scale is None or scheme.scale in held:
        return scheme
    names = [name for name in SCALES_OF_INPUTS if name in held]
    return replace(scheme, scale=names[0]) if names else scheme
