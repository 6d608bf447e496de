"""Repacking of weights to other layouts, and back to the checkpoint's format bit for bit.

Every type of weight is converted to one of seven intermediate forms: plain integers, int8, EXL2, FP8, MXFP8,
FP4 or 4 bits of bitsandbytes. In the tables `KernelIntegers` are integers that only qload's own orders
represent. Every layout is made from one of them. `repack` and `restore` know types and layouts only by
`IntegerWeight` and the tables `READERS` and `WRITERS`. A weight passed as `out` is written after the last
check.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from qload import devices
from qload.errors import ArgumentError, RepackError, checked
from qload.formats import (
    AWQWeight,
    BNB4Weight,
    BNBFP4Weight,
    BNBNF4Weight,
    BNBWeight,
    CTIntWeight,
    EETQWeight,
    Exl2Weight,
    Fp8Weight,
    GGUFWeight,
    GPTQWeight,
    HQQWeight,
    Marlin24Weight,
    MLXFloatWeight,
    MLXWeight,
    MXFP8Weight,
    QuantoWeight,
    TorchAOInt4Weight,
)
from qload.formats.gguf import FLOAT_TYPES, INTEGER_TYPES
from qload.kernel_formats import (
    exl2,
    exllama,
    fp4_marlin,
    fp4_strips,
    fp8_marlin,
    fp8_strips,
    gguf_blocks,
    int8_strips,
    marlin,
    mlx_floats,
    mxfp8_strips,
    panels,
    strips,
    table_strips,
)
from qload.kernel_formats.fp4_marlin import VLLM_0_11, VLLM_0_33, Fp4, Fp4MarlinVllm033Weight, Fp4MarlinWeight
from qload.kernel_formats.int8_strips import Int8
from qload.layouts import Stored, ZeroPoints
from qload.spec import ActivationScheme, Weight
from qload.spec.integers import (
    Integers,
    IntegerWeight,
    KernelIntegers,
    Origin,
    find_unsupported_bits,
    needs_own_order,
)
from qload.spec.weight import tensor_names
from qload.storage import BLOCK_TYPES

W = TypeVar("W", bound=Weight)
OFFSET_FORMATS = (HQQWeight, MLXWeight, QuantoWeight, TorchAOInt4Weight)
INPUT_SCALE_NAMES = ("input_scale", "input_global_scale")


@dataclass(frozen=True)
class Reader:
    """Conversion of a type of weight to its intermediate form, and back.

    Attributes
    ----------
    intermediate
        The intermediate form: `Integers`, `KernelIntegers`, `Int8`, `Exl2Weight`, `Fp8Weight`, `MXFP8Weight`,
        `Fp4` or `BNB4Weight`.
    read
        Convert a weight to that form.
    restore
        Convert that form to the checkpoint weight of an origin; None: the type is a kernel's.
    skippable
        Return the name of the tensor whose values affect no refusal; "" if there is none.
    has_ordered_groups
        Return True if the config of a loaded weight says that its groups are in order.
    """

    intermediate: type[Any]
    read: Callable[[Any], Any] = lambda weight: weight
    restore: Callable[[Any, Origin], Weight] | None = None
    skippable: Callable[[Any], str] = lambda weight: ""
    has_ordered_groups: Callable[[Any], bool] = lambda weight: False


@dataclass(frozen=True)
class Writer:
    """Conversion of an intermediate form to a layout.

    Attributes
    ----------
    weight_type
        Type of the result.
    write
        Convert to that type, exactly or with a RepackError.
    options
        Options of `repack` that `write` takes.
    reads_codes
        Whether refusals depend on codes.
    """

    weight_type: type[Weight]
    write: Callable[..., Weight]
    options: tuple[str, ...] = ()
    reads_codes: bool = False


READERS: dict[type[Weight], Reader] = {  # of types that are no `IntegerWeight`
    exllama.ExllamaWeight: Reader(Integers, exllama.to_integers),
    marlin.GPTQMarlinWeight: Reader(Integers, marlin.to_integers),
    strips.StripsWeight: Reader(Integers, strips.to_integers),
    panels.PanelsWeight: Reader(Integers, panels.to_integers),
    Exl2Weight: Reader(Exl2Weight, restore=lambda weight, _: weight, skippable=lambda _: "q_weight"),
    exl2.Exl2KernelWeight: Reader(Exl2Weight, exl2.to_exl2),
    Fp8Weight: Reader(Fp8Weight, restore=lambda weight, _: weight, skippable=lambda _: "weight"),
    fp8_marlin.Fp8MarlinWeight: Reader(Fp8Weight, fp8_marlin.to_fp8),
    fp8_strips.Fp8StripsWeight: Reader(Fp8Weight, fp8_strips.to_fp8),
    MXFP8Weight: Reader(MXFP8Weight, restore=lambda weight, _: weight, skippable=lambda _: "weight"),
    mxfp8_strips.Mxfp8StripsWeight: Reader(MXFP8Weight, mxfp8_strips.to_mxfp8),
    BNBWeight: Reader(Int8, int8_strips.read_bnb, int8_strips.restore_bnb, lambda _: "weight"),
    EETQWeight: Reader(Int8, int8_strips.read_eetq, int8_strips.restore_eetq, lambda _: "weight"),
    CTIntWeight: Reader(Int8, int8_strips.read_ct_int, int8_strips.restore_ct_int, lambda _: "weight"),
    int8_strips.Int8StripsWeight: Reader(Int8, int8_strips.to_int8),
    **{
        weight_type: Reader(BNB4Weight, restore=lambda weight, _: weight, skippable=lambda _: "weight")
        for weight_type in (BNBNF4Weight, BNBFP4Weight)
    },
    table_strips.TableStripsWeight: Reader(BNB4Weight, table_strips.to_bnb4),
    **{
        weight_type: Reader(
            Fp4, fp4_marlin.read_checkpoint, fp4_marlin.restore_checkpoint, fp4_marlin.find_packed_tensor
        )
        for weight_type in fp4_marlin.TENSOR_NAMES
    },
    Fp4MarlinWeight: Reader(Fp4, fp4_marlin.to_fp4),
    fp4_strips.Fp4StripsWeight: Reader(Fp4, fp4_marlin.to_fp4),
    Fp4MarlinVllm033Weight: Reader(Fp4, fp4_marlin.to_fp4),
}
FP4_OF_MLX = Reader(Fp4, mlx_floats.read_fp4, mlx_floats.restore_fp4, lambda _: "weight")
MLX_READERS = {  # by mode
    "mxfp4": FP4_OF_MLX,
    "nvfp4": FP4_OF_MLX,
    "mxfp8": Reader(MXFP8Weight, mlx_floats.read_mxfp8, mlx_floats.restore_mxfp8, lambda _: "weight"),
}
GGUF_READERS = {  # by the type of blocks
    **{
        kind: Reader(
            Integers,
            GGUFWeight.to_integers,
            GGUFWeight.from_integers,
            lambda weight: BLOCK_TYPES[weight.config.type].suffix,
        )
        for kind in INTEGER_TYPES.values()
    },
    **{
        kind: Reader(
            KernelIntegers,
            gguf_blocks.read_integers,
            gguf_blocks.restore_integers,
            lambda weight: BLOCK_TYPES[weight.config.type].suffix,
        )
        for kind in gguf_blocks.OFFSET_TYPES
    },
    **{kind: Reader(Fp4, gguf_blocks.read_floats, gguf_blocks.restore_floats) for kind in FLOAT_TYPES},
}


def find_reader(weight_type: type[Weight], config: Any = None) -> Reader | None:
    """Return the conversion of a type of weight; None if its weights are not repacked.

    `config`: of the weight; None: the type's example.
    """
    config = config or weight_type.example
    reader = _find_reader(weight_type, config)
    if reader is not None and reader.intermediate is Integers and needs_own_order(config):
        return replace(reader, intermediate=KernelIntegers)
    return reader


def _find_reader(weight_type: type[Weight], config: Any) -> Reader | None:
    if issubclass(weight_type, IntegerWeight):
        return None if weight_type.describe_unsupported(config) else _integer_reader(weight_type)
    if weight_type is GGUFWeight:
        return GGUF_READERS.get(config.type)
    if weight_type is MLXFloatWeight:
        return MLX_READERS[config.mode]
    return READERS.get(weight_type)


@cache
def _integer_reader(weight_type: type[IntegerWeight]) -> Reader:
    return Reader(
        KernelIntegers if issubclass(weight_type, OFFSET_FORMATS) else Integers,
        weight_type.to_integers,
        weight_type.from_integers,
        weight_type.skippable_tensor,
        weight_type.has_ordered_groups,
    )


_TO_FP4_MARLIN_VLLM_0_33 = partial(fp4_marlin.from_fp4, weight_type=Fp4MarlinVllm033Weight)
WRITERS: dict[tuple[type[Any], str], Writer] = {
    (Integers, "gptq"): Writer(GPTQWeight, GPTQWeight.from_integers, ("zeros",)),
    (Integers, "gptq_v2"): Writer(GPTQWeight, partial(GPTQWeight.from_integers, zeros=Stored())),
    (Integers, "awq"): Writer(AWQWeight, AWQWeight.from_integers),
    (Integers, "exllama"): Writer(exllama.ExllamaWeight, exllama.from_integers, ("zeros",)),
    (Integers, "marlin"): Writer(marlin.GPTQMarlinWeight, marlin.from_integers),
    (Integers, "strips"): Writer(strips.StripsWeight, strips.from_integers),
    (Integers, "panels"): Writer(panels.PanelsWeight, panels.from_integers),
    (KernelIntegers, "strips"): Writer(strips.StripsWeight, strips.from_integers),
    (KernelIntegers, "panels"): Writer(panels.PanelsWeight, panels.from_integers),
    (Integers, "marlin_24"): Writer(Marlin24Weight, Marlin24Weight.from_integers, reads_codes=True),
    (Exl2Weight, "exllama"): Writer(exl2.Exl2KernelWeight, exl2.from_exl2),
    (Fp8Weight, "marlin"): Writer(
        fp8_marlin.Fp8MarlinWeight, fp8_marlin.from_fp8, ("dtype", "exponent_bias", "whole")
    ),
    (Fp8Weight, "strips"): Writer(fp8_strips.Fp8StripsWeight, fp8_strips.from_fp8, ("whole",)),
    (MXFP8Weight, "strips"): Writer(mxfp8_strips.Mxfp8StripsWeight, mxfp8_strips.from_mxfp8, ("whole",)),
    (Int8, "strips"): Writer(int8_strips.Int8StripsWeight, int8_strips.from_int8),
    (BNB4Weight, "strips"): Writer(table_strips.TableStripsWeight, table_strips.from_bnb4, ("whole",)),
    (Fp4, "strips"): Writer(fp4_strips.Fp4StripsWeight, fp4_strips.from_fp4, ("whole",)),
    (Fp4, "marlin"): Writer(Fp4MarlinWeight, fp4_marlin.from_fp4, ("dtype", "whole")),
    (Fp4, VLLM_0_11.layout): Writer(Fp4MarlinWeight, fp4_marlin.from_fp4, ("dtype", "whole")),
    (Fp4, VLLM_0_33.layout): Writer(Fp4MarlinVllm033Weight, _TO_FP4_MARLIN_VLLM_0_33, ("dtype", "whole")),
}
NUMBERS_IN_STRIPS = (  # strips with kernels for unquantized activations alone
    fp4_strips.Fp4StripsWeight,
    fp8_strips.Fp8StripsWeight,
    int8_strips.Int8StripsWeight,
    mxfp8_strips.Mxfp8StripsWeight,
    table_strips.TableStripsWeight,
)
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
    """Convert a weight to another layout, exactly: a typed weight with its own `dequantize()`.

    RepackError with the reason if the layout cannot represent the weight; CastError for an FP8 scale that
    overflows or loses bits; ArgumentError for an option that the layout does not take, or an `out` that does
    not fit.

    Parameters
    ----------
    weight
        A weight with at least one layout in `targets`, whole or a share.
    layout
        "gptq" (zero points stored minus one), "gptq_v2" (zero points as they are), "awq", "exllama" and
        "marlin" (the orders of their kernels), "strips" (qload's CUDA order for few tokens), "panels"
        (qload's CPU order), "marlin_24" (for 2:4 sparse weights). For NVFP4 and MXFP4: "marlin_vllm_0_33" and
        "marlin_vllm_0_11", the Marlin kernel of that version of vLLM; "marlin" is the latter.
    out
        A weight of the target's type and shapes. Its tensors are overwritten and returned; an error leaves
        them unchanged.
    zeros
        Convention of stored zero points for "gptq" and "exllama", if not the layout's own: `StoredMinusOne()`
        subtracts 1 from whole words, `StoredMinusOnePerField()` from each field.
    dtype
        Dtype of the activations, float16 or bfloat16; required for FP8, NVFP4 and MXFP4 in Marlin's orders.
    exponent_bias
        Whether FP8 scales include the factor of the exponent (vLLM's kernel), or the kernel applies it
        (TGI's); required for FP8 to "marlin".
    whole
        The whole layer if the weight is a share of it. Its values decide all refusals, equally on every rank.
        Its codes are read for "marlin_24" alone.

    Examples
    --------
    >>> import torch
    >>> from qload import AWQConfig, AWQWeight, repack
    >>> words, scales = torch.arange(512).int().reshape(64, 8), torch.ones(2, 64).half()
    >>> awq = AWQWeight(config=AWQConfig(32), qweight=words, qzeros=words[:2], scales=scales)
    >>> torch.equal(repack(awq, "gptq_v2").dequantize(), awq.dequantize())
    True
    """
    reader, writer = _require(weight, layout)
    weight.check_values()
    if whole is not None and _require(whole, layout)[0].intermediate is not reader.intermediate:
        raise ArgumentError("whole", f"the layer that the {weight.format} weight is a share of", whole.format)
    choices = {"zeros": zeros, "dtype": dtype, "exponent_bias": exponent_bias}
    choices = {option: value for option, value in choices.items() if value is not None}
    for option, value in choices.items():
        if option not in writer.options:
            raise ArgumentError(option, _describe_option(option), f"{value} for {weight.format} to {layout}")
    writes: list[Callable[[], object]] = []
    repacked = convert(weight, layout, whole, choices, out=out, writes=writes)
    return repacked if out is None else _write_into(out, repacked, writes)


def convert(
    weight: Weight,
    layout: str,
    whole: Weight | None = None,
    choices: Mapping[str, Any] = MappingProxyType({}),
    *,
    loaded: bool = False,
    out: Weight | None = None,
    writes: list[Callable[[], object]] | None = None,
) -> Weight:
    """Repack a weight, by options of `repack` in `choices`.

    `loaded`: the weight is fresh from its loader, and its config is trusted on the order of groups. `writes`
    gets the writes to `out`, for after the last check.
    """
    reader, writer = _require(weight, layout)
    if type(weight) is writer.weight_type and writer.weight_type is not GPTQWeight and not choices:
        repacked: Weight = weight
    else:
        layer = None if whole is None else _require(whole, layout)[0].read(whole)  # raises on every rank
        intermediate = reader.read(weight)
        if isinstance(intermediate, Integers):
            unsupported = find_unsupported_bits(intermediate.bits)
            if unsupported is not None and reader.intermediate is Integers:
                raise RepackError(weight.format, layout, unsupported)
            target = out if type(out) is writer.weight_type and not _share_memory(out, weight) else None
            ordered = loaded and reader.has_ordered_groups(weight)
            if layer is not None or target is not None or ordered:
                intermediate = replace(
                    intermediate,
                    whole=layer,
                    out=target,
                    known_in_order=ordered,
                    deferred_writes=[] if writes is None else writes,
                )
        given = {**dict.fromkeys(writer.options), **choices}
        if "whole" in given:
            given["whole"] = layer
        repacked = writer.write(intermediate, **given)
    return _with_origin(repacked, _find_origin(repacked), weight)


@checked
def restore(weight: Weight) -> Weight:
    """Restore the checkpoint weight that was repacked, bit for bit.

    A weight that was not repacked is returned unchanged; a kernel's integer weight built by hand is converted
    to GPTQ. `weight`: the result of `repack` or of a loader that repacks.

    Examples
    --------
    >>> import torch
    >>> from qload import AWQConfig, AWQWeight, repack, restore
    >>> words, scales = torch.arange(512).int().reshape(64, 8), torch.ones(2, 64).half()
    >>> awq = AWQWeight(config=AWQConfig(32), qweight=words, qzeros=words[:2], scales=scales)
    >>> torch.equal(restore(repack(awq, "marlin")).qweight, awq.qweight)
    True
    """
    origin, reader = weight.layer.origin, find_reader(type(weight), weight.config)
    if reader is None or (origin is None and reader.restore is not None):
        return weight
    intermediate = reader.read(weight)
    if isinstance(origin, Origin):
        checkpoint = find_reader(origin.weight_type, origin.config)
        assert checkpoint is not None
        assert checkpoint.restore is not None  # `_find_origin` records no kernel's type
        restored = replace(checkpoint.restore(intermediate, origin), config=origin.config)
    elif isinstance(intermediate, Integers):
        restored = GPTQWeight.from_integers(intermediate, zeros=intermediate.convention)
    else:
        restored = intermediate
    return _with_origin(restored, None, weight)


def targets(weight_type: type[Weight], config: Any = None) -> tuple[str, ...]:
    """Return the layouts for weights of a type; single weights may still be refused.

    `config`: of the weights; None: any config.
    """
    configs = (weight_type.example, *weight_type.further) if config is None else (config,)
    readers = [find_reader(weight_type, each) for each in configs]
    intermediates = {reader.intermediate for reader in readers if reader is not None}
    return tuple(
        dict.fromkeys(
            layout
            for (source, layout), writer in WRITERS.items()
            if source in intermediates
            and (writer.weight_type is not weight_type or weight_type is GPTQWeight)
        )
    )


def can_restore(weight_type: type[Weight]) -> bool:
    """Return True if `restore` undoes a repack of weights of a type."""
    configs = weight_type.example, *weight_type.further
    return any(find_reader(weight_type, config) is not None for config in configs)


def find_writer(weight_type: type[Weight], layout: str, config: Any = None) -> Writer | None:
    """Return the conversion of a type to a layout; None if not supported. `config`: as in `find_reader`."""
    reader = find_reader(weight_type, config)
    return None if reader is None else WRITERS.get((reader.intermediate, layout))


def find_repacked_type(weight_type: type[Weight], layout: str, config: Any = None) -> type[Weight] | None:
    """Return the type of the repacked weight; None if not supported. `config`: as in `find_reader`."""
    writer = find_writer(weight_type, layout, config)
    return writer.weight_type if writer else None


def options(weight_type: type[Weight], layout: str, config: Any = None) -> tuple[str, ...]:
    """Return the options of `repack` for a type and a layout. `config`: as in `find_reader`."""
    writer = find_writer(weight_type, layout, config)
    return writer.options if writer else ()


def find_unsupported_panels(weight: Weight) -> str | None:
    """Return the reason if a checkpoint's weight is not repacked to panels, else None; reads no codes.

    The reasons are those of `target="auto"` on a CPU.
    """
    reader = find_reader(type(weight), weight.config)
    if reader is None or not issubclass(reader.intermediate, Integers) or reader.restore is None:
        return f"{weight.format} is not repacked to panels"
    if isinstance(weight, Marlin24Weight):
        return "2:4 sparse weights stay as they are stored"
    try:
        return panels.find_unsupported(reader.read(weight))
    except RepackError as error:
        return error.reason


def skippable_tensor(weight: Weight, layout: str) -> str:
    """Return the name of the tensor whose values affect no refusal by a layout; "" if there is none."""
    kind = type(weight)
    reader, writer = find_reader(kind, weight.config), find_writer(kind, layout, weight.config)
    return "" if reader is None or writer is None or writer.reads_codes else reader.skippable(weight)


def _require(weight: Weight, layout: str) -> tuple[Reader, Writer]:
    """Return both steps of a repack; RepackError for an unsupported one."""
    if layout not in LAYOUTS:
        raise ArgumentError("layout", f"one of {', '.join(LAYOUTS)}", repr(layout))
    reader = find_reader(type(weight), weight.config)
    if reader is None:
        reason = f"{type(weight).__name__} has no codes to repack"
        if isinstance(weight, IntegerWeight):
            reason = weight.describe_unsupported(weight.config) or reason
        if isinstance(weight, GGUFWeight):
            reason = gguf_blocks.describe_unsupported(weight.config.type)
        raise RepackError(weight.format, layout, reason)
    writer = WRITERS.get((reader.intermediate, layout))
    if writer is None:
        supported = ", ".join(targets(type(weight), weight.config))
        reason = f"{weight.format} is repacked to {supported}, and nothing else"
        if reader.intermediate is KernelIntegers and (Integers, layout) in WRITERS:
            bits = find_unsupported_bits(weight.config.bits)
            reason = f"{bits or 'its float offsets have no place in other layouts'}; {reason}"
        raise RepackError(weight.format, layout, reason)
    return reader, writer


def _describe_option(option: str) -> str:
    """Return the expected value of an option that is not taken, with the layouts that take it."""
    layouts = {
        layout if issubclass(intermediate, Integers) else f"{intermediate.format} to {layout}"
        for (intermediate, layout), writer in WRITERS.items()
        if option in writer.options
    }
    return f"None, as only {' and '.join(sorted(layouts, reverse=True))} have a choice"


def _find_origin(repacked: Weight) -> Origin | None:
    """Return the origin to record; None for the checkpoint weight itself, or a kernel's type as origin."""
    origin = repacked.layer.origin
    reader = find_reader(origin.weight_type, origin.config) if isinstance(origin, Origin) else None
    if not isinstance(origin, Origin) or reader is None or reader.restore is None:
        return None
    return None if type(repacked) is origin.weight_type and repacked.config == origin.config else origin


def _with_origin(weight: W, origin: Origin | None, source: Weight) -> W:
    """Record the origin of a weight, and copy the tensors that it shares with its source.

    A later write to one of the two then leaves the other unchanged.
    """
    layer = weight.layer.with_origin(origin, _rename_input_scale(weight))
    pointers = [tensor.data_ptr() for tensor in source.fields().values()]
    tensors: dict[str, Tensor | None] = {}
    for name in tensor_names(type(weight)):
        tensor: Tensor | None = getattr(weight, name)
        is_shared = tensor is not None and tensor.data_ptr() in pointers
        tensors[name] = tensor.clone() if tensor is not None and is_shared else tensor
    return type(weight).unchecked(weight.config, layer, tensors)


def _rename_input_scale(weight: Weight) -> ActivationScheme | None:
    """Return the activation scheme with this format's name of the stored input scale."""
    scheme = weight.layer.activations
    if scheme is None or scheme.scale is None:
        return scheme
    tensors = weight.fields()
    if scheme.scale in tensors:
        return scheme
    names = [name for name in INPUT_SCALE_NAMES if name in tensors]
    return replace(scheme, scale=names[0]) if names else scheme


def _share_memory(out: Weight, source: Weight) -> bool:
    """Return True if the weights have a storage in common."""
    first, second = ({t.untyped_storage().data_ptr() for t in w.fields().values()} for w in (out, source))
    return bool(first & second)


def _write_into(out: Weight, repacked: W, writes: Iterable[Callable[[], object]]) -> W:
    """Write `repacked` into the tensors of `out`; ArgumentError before the first write if `out` does not fit.

    `repacked` may contain tensors of `out`; `writes` fill them.
    """
    tensors, results = out.fields(), repacked.fields()
    expected, got = _describe_tensors(repacked), _describe_tensors(out)
    if type(out) is not type(repacked) or expected != got:
        expected_type, got_type = type(repacked).__name__, type(out).__name__
        raise ArgumentError("out", f"{expected_type} with {expected}", f"{got_type} with {got}")
    for name, tensor in tensors.items():
        devices.check_writable(tensor, f"out: {name}")
    _check_overlap(tensors)
    for write in writes:
        write()
    for name, tensor in tensors.items():
        if tensor is not results[name]:
            tensor.copy_(results[name])
    return repacked.holding(tensors)


def _check_overlap(tensors: Mapping[str, Tensor]) -> None:
    """Raise ArgumentError if a contiguous tensor begins within another."""
    spans = [(t.data_ptr(), t.nbytes, name) for name, t in tensors.items() if t.is_contiguous() and t.numel()]
    for (start, size, name), (following, _, other) in pairwise(sorted(spans)):
        if 0 < following < start + size:
            raise ArgumentError(
                "out", "tensors with memory of their own", f"{name} and {other} with overlapping memory"
            )


def _describe_tensors(weight: Weight) -> dict[str, str]:
    """Return dtype, shape and device of each tensor, for messages."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
        for name, tensor in weight.fields().items()
    }
