"""From what a checkpoint claims to the loader that reads it."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, overload

import torch

from qload.detect.config_reader import named_modules, read_claims
from qload.detect.dialects import METHOD_KEYS, Recogniser, refuse_foreign
from qload.detect.files import FoundConfig
from qload.detect.matching import PLAIN
from qload.detect.validation import Claims
from qload.errors import ArgumentError, ConfigError, UnsupportedFormatError, checked
from qload.formats import (
    ROLES,
    AWQConfig,
    AWQWeight,
    EETQConfig,
    EETQWeight,
    Exl2Config,
    Exl2Weight,
    GPTQConfig,
    GPTQWeight,
    Marlin24Config,
    Marlin24Weight,
    MarlinConfig,
    MarlinWeight,
    UnquantizedConfig,
    UnquantizedWeight,
)
from qload.formats.gptq import BITS
from qload.formats.unquantized import FLOATS
from qload.layouts import STORED_MINUS_ONE, Stored, ZeroPoints
from qload.loader import ConfiguredFormat, FormatLoader, WeightsLoader
from qload.loader.named_modules import NOTHING_NAMED
from qload.spec import Role
from qload.spec.weight import TARGET_LOADER, call_upward
from qload.storage import WeightStorage

log: logging.Logger = logging.getLogger("qload")


LEGACY = {"bits": "gptq_bits", "group_size": "gptq_groupsize", "sym": "gptq_sym"}


class DefaultWeightsLoader(FormatLoader):
    """Loads plain weights. A layer stored in another way is an error, never a guess."""

    @checked
    def __init__(self) -> None:
        super().__init__(PLAIN)


class GPTQWeightsLoader(FormatLoader):
    """Loads GPTQ layers, and layers left plain as plain; which one a layer is, its tensors say.

    The keywords `bits`, `group_size`, `zeros` and `desc_act` are those of `GPTQConfig`.
    """

    @checked
    def __init__(
        self,
        *,
        bits: int,
        group_size: int,
        zeros: ZeroPoints = STORED_MINUS_ONE,
        desc_act: bool | None = None,
    ) -> None:
        config = GPTQConfig(bits, group_size, zeros, desc_act=desc_act, indexed=True if desc_act else None)
        super().__init__(ConfiguredFormat(GPTQWeight, config), PLAIN)


class AWQWeightsLoader(FormatLoader):
    """Loads AWQ GEMM layers, and layers left plain as plain; which one a layer is, its tensors say.

    The keywords `group_size`, `bits` and `zero_point` are those of `AWQConfig`.
    """

    @checked
    def __init__(self, *, group_size: int, bits: int = 4, zero_point: bool = True) -> None:
        super().__init__(ConfiguredFormat(AWQWeight, AWQConfig(group_size, bits, zero_point)), PLAIN)


class MarlinWeightsLoader(FormatLoader):
    """Loads layers that are stored as Marlin's kernel reads them, dense or 2:4 sparse, and plain ones.

    The keywords `group_size` and `bits` are those of `MarlinConfig`; `is_marlin_24`: of 2:4 sparse layers.
    """

    @checked
    def __init__(self, *, group_size: int, bits: int = 4, is_marlin_24: bool = False) -> None:
        dense, sparse = (
            ConfiguredFormat(MarlinWeight, MarlinConfig(group_size, bits)),
            Marlin24Config(group_size, bits),
        )
        super().__init__(ConfiguredFormat(Marlin24Weight, sparse) if is_marlin_24 else dense, PLAIN)


class Exl2WeightsLoader(FormatLoader):
    """Loads EXL2 layers, each of the widths that its own tensors say, and layers left plain as plain."""

    @checked
    def __init__(self) -> None:
        super().__init__(ConfiguredFormat(Exl2Weight, Exl2Config()), PLAIN)


class EETQWeightsLoader(FormatLoader):
    """Loads EETQ layers, and layers left plain as plain; which one a layer is, its tensors say."""

    @checked
    def __init__(self) -> None:
        super().__init__(ConfiguredFormat(EETQWeight, EETQConfig()), PLAIN)


KERNELS = ("auto", "marlin", "strips", "panels", "exllama")


@dataclass(frozen=True)
class KernelTarget:
    """What weights are repacked for, where there is more to say than the kernel's name.

    ArgumentError where the attributes are not of their types or do not go together.

    Attributes
    ----------
    kernel
        "marlin", "strips", "panels", "exllama", or "auto": the fastest that says yes, which is our own strips
        for weights on a Hopper GPU and our own panels on a CPU, Marlin's order elsewhere and for what these
        cannot say, ExLlama's for what none of them can say and a GPU's kernels can.
    zeros
        How "exllama" stores zero points; None: as the checkpoint does.
    dtype, exponent_bias
        Of FP8, NVFP4 and MXFP4 for Marlin's kernel (`repack`; the second of FP8 alone); without a dtype
        "auto" leaves them as they are stored.

    Examples
    --------
    >>> import torch
    >>> from qload import KernelTarget, MemoryStorage, Weights, loader_from_config
    >>> tensors = {"up.weight": torch.ones(64, 128).to(torch.float8_e4m3fn), "up.weight_scale": torch.ones(1)}
    >>> target = KernelTarget("marlin", dtype=torch.bfloat16)
    >>> loader = loader_from_config({"quant_method": "fp8"}, target=target)
    >>> weight = Weights(MemoryStorage(tensors), loader=loader).get_weights("up")
    >>> weight.format, weight.scales.dtype
    ('fp8_marlin', torch.bfloat16)
    """

    kernel: Literal["auto", "marlin", "strips", "panels", "exllama"]
    zeros: ZeroPoints | None = None
    dtype: torch.dtype | None = None
    exponent_bias: bool = True

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            expected = f"None, a KernelTarget, or one of {', '.join(KERNELS)}"
            raise ArgumentError("target", expected, repr(self.kernel))
        if not isinstance(self.zeros, ZeroPoints | None):
            raise ArgumentError("target: zeros", "None, or such as StoredMinusOne()", repr(self.zeros))
        if not isinstance(self.dtype, torch.dtype | None):
            raise ArgumentError("target: dtype", "None, or a dtype of torch's", repr(self.dtype))
        if not isinstance(self.exponent_bias, bool):
            raise ArgumentError("target: exponent_bias", "True or False", repr(self.exponent_bias))
        if self.zeros is not None and self.kernel != "exllama":
            raise ArgumentError("target: zeros", "None, as only exllama has a choice", repr(self.zeros))
        if self.dtype is not None and self.kernel in ("strips", "panels", "exllama"):
            raise ArgumentError(
                "target: dtype", "None, as only FP8 and FP4 for Marlin take one", str(self.dtype)
            )


Target = Literal["auto", "marlin", "strips", "panels", "exllama"] | KernelTarget


@overload
def loader_from_config(
    quantization_config: Mapping[str, Any] | None,
    storage: WeightStorage | None = None,
    *,
    target: None = None,
) -> FormatLoader: ...


@overload
def loader_from_config(
    quantization_config: Mapping[str, Any] | None, storage: WeightStorage | None = None, *, target: Target
) -> WeightsLoader: ...


def loader_from_config(
    quantization_config: Mapping[str, Any] | None,
    storage: WeightStorage | None = None,
    *,
    target: Target | None = None,
) -> WeightsLoader:
    """The loader for a `quantization_config`; None means plain weights.

    Parameters
    ----------
    quantization_config
        As a checkpoint's JSON has it.
    storage
        Looked through for the tensors in which old GPTQ checkpoints keep their settings (`gptq_bits`,
        `gptq_groupsize`): tensors are believed before the config.
    target
        What the loaded weights are repacked for: "marlin", "strips", "panels", "exllama", or "auto", the
        fastest that says yes where a weight lies, or a `KernelTarget` with more to say; None keeps the
        checkpoint's types.

    Raises
    ------
    ConfigError
        Where the config is malformed, or contradicts those tensors.
    UnsupportedFormatError
        For a method that is not read.
    ArgumentError
        Where `storage` is none.

    Examples
    --------
    >>> from qload import loader_from_config
    >>> loader = loader_from_config({"quant_method": "gptq", "bits": 4, "group_size": 128})
    >>> [fmt.weight_type.__name__ for fmt in loader.formats]
    ['GPTQWeight', 'UnquantizedWeight']
    """
    if quantization_config is not None and not isinstance(quantization_config, Mapping):
        raise ConfigError(
            "quantization_config", "config", "a mapping or None", type(quantization_config).__name__
        )
    if not isinstance(storage, WeightStorage | None):
        raise ArgumentError("storage", "None, or a storage such as MemoryStorage", type(storage).__name__)
    found = (
        None
        if quantization_config is None
        else FoundConfig("config", "quantization_config", quantization_config)
    )
    return for_target(loader_from_claims(found, storage), target)


def for_target(loader: WeightsLoader, target: Target | None) -> WeightsLoader:
    """A loader that repacks for a kernel what `loader` loads; `target` None: as it is."""
    if target is None:
        return loader
    kernel_target = target if isinstance(target, KernelTarget) else KernelTarget(target)
    repacking: WeightsLoader = call_upward(TARGET_LOADER, loader, kernel_target)
    return repacking


def loader_from_claims(found: FoundConfig | None, storage: WeightStorage | None) -> FormatLoader:
    """As `loader_from_config`, for a config as it was found in a file."""
    claims = settle(found, storage)
    if claims is None:
        plain_loader = DefaultWeightsLoader()
        plain_loader.recognise_by(Recogniser(configured=False))
        return plain_loader
    plain = ConfiguredFormat(UnquantizedWeight, UnquantizedConfig(unused=claims.unused))
    formats = [replace(fmt, claims=fmt.claims or claims.of_layers) for fmt in claims.formats]
    make = claims.loader or (lambda: FormatLoader(*formats, plain, exclusions=claims.exclusions))
    loader = make()
    loader.named = named_modules(found) if found else NOTHING_NAMED
    loader.recognise_by(Recogniser(claims.formats))
    for note in claims.notes:
        log.info("%s", note)
    stored = storage.keys() if storage else ()
    loader.config_tensors = tuple(name for name in LEGACY.values() if name in stored)
    return loader


def settle(found: FoundConfig | None, storage: WeightStorage | None) -> Claims | None:
    """The config's claims, overruled by the settings that a checkpoint keeps in tensors."""
    if storage is not None:
        refuse_foreign(found, storage)
    if storage is not None and found is not None and _states_nothing(found, storage):
        return Claims(
            method="unquantized",
            format="unquantized",
            file=found.file,
            section=found.section,
            notes=(f"{found.file}: {found.section} has no quant_method, and all weights are plain",),
        )
    claims = _claims(found, storage) if found else None
    names = storage.keys() if storage else ()
    if storage is None or LEGACY["bits"] not in names:
        return claims
    if claims and claims.method not in ("gptq", "awq"):
        raise ConfigError(claims.file, "quant_method", "gptq, as there is a tensor gptq_bits", claims.method)
    outlived = claims if claims and claims.method == "awq" else None
    if outlived:  # of layers that are not there any more
        log.warning("%s claims awq; there is a tensor gptq_bits, which is believed: gptq", outlived.file)
        claims = None
    if claims and claims.loader:
        raise ConfigError(claims.file, "dynamic", "nothing, as gptq_bits holds for all modules", "rules")
    stored = {key: _scalar(storage, name) for key, name in LEGACY.items() if name in names}
    if "group_size" not in stored:
        raise ConfigError("gptq_bits", LEGACY["group_size"], "a tensor, as there is gptq_bits", "nothing")
    bits, group_size = stored["bits"], stored["group_size"]
    base = claims or Claims("gptq", "gptq", bits, group_size, file=LEGACY["bits"])
    if outlived:
        base = replace(base, file=outlived.file, exclusions=outlived.exclusions)
    sym = bool(stored["sym"]) if "sym" in stored else base.sym
    settled = replace(base, bits=bits, group_size=group_size, sym=sym)
    if claims and (claims.bits, claims.group_size) != (settled.bits, settled.group_size):
        log.warning(
            "%s claims %d bits, group size %d; gptq_bits and gptq_groupsize say %d, %d and are believed",
            claims.file,
            claims.bits,
            claims.group_size,
            settled.bits,
            settled.group_size,
        )
    if settled.bits not in BITS:
        raise ConfigError(LEGACY["bits"], "value", "2, 3, 4 or 8", str(settled.bits))
    if settled.group_size == 0:
        raise ConfigError(LEGACY["group_size"], "value", "-1 or at least 1", "0")
    zeros: ZeroPoints = Stored() if settled.format == "gptq_v2" else STORED_MINUS_ONE
    config = GPTQConfig(
        bits,
        group_size,
        zeros,
        desc_act=settled.desc_act,
        indexed=True if settled.desc_act else None,
    )
    return replace(settled, formats=(ConfiguredFormat(GPTQWeight, config),))


def _claims(found: FoundConfig, storage: WeightStorage | None) -> Claims:
    """Read a config's claims; an UnsupportedFormatError names the quantized tensors."""
    try:
        return read_claims(found)
    except UnsupportedFormatError as error:
        stored = sorted(_quantized(storage)) if storage else []
        if not stored:
            raise
        named = f"{error.reason}; {len(stored)} tensors are stored so, as {stored[0]:.200}"
        raise replace(error, reason=named) from None


def _quantized(storage: WeightStorage) -> Iterator[str]:
    """Yield the tensors of quantized layers, by names and dtypes."""
    for name in storage.keys():  # noqa: SIM118
        info = storage.info(name)
        special = ROLES.get(name.rpartition(".")[2], Role.FLOAT) is not Role.FLOAT
        if special or (len(info.shape) > 1 and info.dtype not in FLOATS):
            yield name


def _states_nothing(found: FoundConfig, storage: WeightStorage) -> bool:
    """Return whether the section names no method and no stored tensor is quantized."""
    if not found.section or any(found.values.get(key) for key in METHOD_KEYS):
        return False
    return next(_quantized(storage), None) is None


def _scalar(storage: WeightStorage, name: str) -> int:
    shape = storage.info(name).shape
    if prod(shape) != 1:
        raise ConfigError(name, "value", "one whole number, at least -1", f"a tensor of shape {shape}")
    value = storage.read(name).item()
    if isinstance(value, complex) or not float(value).is_integer() or not -1 <= value < 1 << 31:
        raise ConfigError(name, "value", "one whole number, at least -1", str(value))
    return int(value)
