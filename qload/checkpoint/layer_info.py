"""Descriptions of a checkpoint's layers, before any weight is read, and a load of all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from qload.checkpoint.checkpoint import opened
from qload.checkpoint.coverage import account
from qload.checkpoint.layer_index import LayerIndex
from qload.dtypes import DtypeLike
from qload.errors import ConfigError, MismatchError, QloadError, checked
from qload.formats import AWQConfig, GPTQConfig, Marlin24Config, MarlinConfig
from qload.layouts import Packing, Stored, ZeroPoints, awq, gptq
from qload.lazy_torch import Tensor, torch
from qload.loader import LayerDescription, WeightsLoader
from qload.sentences import WORD_BITS
from qload.spec import ActivationScheme, Config, Grouped, LayerClaims, Role, Weight
from qload.storage import TensorInfo, WeightStorage, rows
from qload.storage.protocol import read_array, row_runs
from qload.weights import Weights


def zero_point_convention(layer: LayerDescription) -> tuple[ZeroPoints, Packing] | None:
    """Convention and packing of a layer's zero points; None without stored zero points."""
    config = layer.format.config
    if isinstance(config, GPTQConfig):
        return config.zeros, gptq.columns(config.bits)
    if isinstance(config, AWQConfig) and config.zero_point:
        return Stored(), awq.columns(config.bits)
    return None


def zero_point_runs(storage: WeightStorage, layer: LayerDescription) -> Iterator[tuple[int, Tensor, bool]]:
    """Yield (first group, packed zero points, whether all are 2**(bits - 1)) of each run of groups."""
    stored = zero_point_convention(layer)
    if stored is None:
        return
    middle = torch.from_numpy(middle_words(*stored, layer.N))
    for start, run in zero_point_words(storage, layer):
        yield start, run, bool((run == middle).all())


def middle_words(zeros: ZeroPoints, packing: Packing, N: int) -> NDArray[np.int32]:
    """Words of `N` zero points 2**(bits - 1), as stored."""
    field, bits = zeros.middle(packing.bits), packing.bits
    run = sum(field << bits * at for at in range(WORD_BITS))  # equal fields have one order
    words = np.frombuffer(run.to_bytes(WORD_BITS * bits // 8, "little"), np.int32)
    return np.resize(words, N * bits // WORD_BITS)


def zero_point_words(storage: WeightStorage, layer: LayerDescription) -> Iterator[tuple[int, Tensor]]:
    """Yield (first group, packed zero points) of each run of groups."""
    return rows(storage, layer.names.full("qzeros"))


@dataclass(frozen=True)
class LayerInfo:
    """Description of a checkpoint's layer, from headers, `g_idx` and zero points.

    Attributes
    ----------
    prefix
        Argument of `get_weights`.
    format
        Name of the checkpoint format; None for an unknown format.
    bits
        Bits per code; None for a format without codes, or with several widths.
    group_size
        Inputs per scale; -1: all inputs; None for a format without groups.
    sym
        Whether every zero point is the middle, by the stored zero points, else by the config.
    act_order
        Whether the order of groups differs from the order of inputs.
    shape
        (N, K); (N,) for a vector; () if unknown.
    expected
        (N, K) by the model's config, for a known model type.
    dtype
        Dtype of the stored weight, for plain, FP8 and FP4 weights; dtype of the scales for integer codes.
    bytes
        Bytes of `tensors`.
    config
        Config of the layer, equal to its typed weight's.
    tensors
        Tensors of a load, by full name, without the bias.
    activations
        Activation scheme declared by the config, with full names of a stored scale and zero point; None
        without a declaration.
    excluded
        Key and entry of the config that exclude a plain layer; None for a layer without one.
    target
        Kernel format after repacking by the loader, as far as the type tells; None for the stored format.
    scale_dtype
        Dtype of the scales; None without scales.
    claims
        Claims of the config about this layer, by the entry for its module; None without claims.
    error
        Error of a load; then `tensors` are all tensors with the prefix, and other fields are empty.
    """

    prefix: str
    format: str | None
    bits: int | None
    group_size: int | None
    sym: bool | None
    act_order: bool | None
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    config: Config | None = None
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    activations: ActivationScheme | None = None
    excluded: str | None = None
    target: str | None = None
    scale_dtype: str | None = None
    expected: tuple[int, ...] | None = None
    claims: LayerClaims | None = None
    error: QloadError | None = None

    @property
    def plain(self) -> bool:
        """True if the layer is plain floats."""
        return self.format == "unquantized"


def info_of(weights: Weights, layer: LayerDescription) -> LayerInfo:
    """Describe a layer that can be loaded."""
    storage, config, plain = weights.storage, layer.format.config, layer.format.weight_type.plain
    dtype, scale_dtype = _dtypes(layer)
    tensors = {name: storage.info(name) for name in (layer.names.full(spec.name) for spec in layer.specs)}
    return LayerInfo(
        prefix=layer.prefix,
        format=layer.format.weight_type.format,
        bits=getattr(config, "bits", None),
        group_size=config.group_size if isinstance(config, Grouped) else None,
        sym=_is_symmetric(storage, layer),
        act_order=_has_act_order(layer),
        shape=(layer.N, layer.K) if "K" in layer.sizes else (layer.N,),
        dtype=dtype,
        bytes=sum(info.nbytes for info in tensors.values()),
        config=config,
        tensors=tensors,
        activations=_activations(layer),
        excluded=_exclusion_reason(weights, layer.prefix) if plain else None,
        target=_target(weights, layer),
        scale_dtype=scale_dtype,
        expected=weights.architecture.expected(layer.prefix)
        if weights.architecture and "K" in layer.sizes
        else None,
        claims=layer.format.claims,
    )


def _target(weights: Weights, layer: LayerDescription) -> str | None:
    """Kernel format after repacking by the loader; None for a loader of stored formats."""
    loader = weights.loader
    return None if type(loader).made is WeightsLoader.made else loader.made(layer, weights.device)


def info_of_broken(index: LayerIndex, prefix: str, error: QloadError) -> LayerInfo:
    """Describe a layer that cannot be loaded."""
    storage = index.weights.storage
    tensors = {name: storage.info(name) for name in index.under(prefix)}
    nbytes = sum(info.nbytes for info in tensors.values())
    return LayerInfo(prefix, None, None, None, None, None, (), "", nbytes, tensors=tensors, error=error)


def _dtypes(layer: LayerDescription) -> tuple[str, str | None]:
    """Dtype names of the weight and of the scales.

    Neither integers nor scales of one byte tell the dtype of a product.
    """
    roles = {
        spec.role: layer.dtypes[spec.name] for spec in reversed(layer.specs)
    }  # first tensor of each role
    stored = roles.get(Role.FLOAT, roles.get(Role.WORD))
    scales = roles.get(Role.SCALE, stored)
    assert stored is not None  # every layer has a weight
    assert scales is not None
    kept = stored if stored.is_floating_point or scales.itemsize == 1 else scales
    return _dtype_name(kept), _dtype_name(scales) if Role.SCALE in roles else None


@cache
def _dtype_name(dtype: DtypeLike) -> str:
    return str(dtype).removeprefix("torch.")


def _activations(layer: LayerDescription) -> ActivationScheme | None:
    """Activation scheme with full names of the stored scale and zero point."""
    scheme = layer.format.activations
    if scheme is None or scheme.scale is scheme.zero_point is None:
        return scheme
    scale, zeros = (
        None if name is None else layer.names.full(name) for name in (scheme.scale, scheme.zero_point)
    )
    return replace(scheme, scale=scale, zero_point=zeros)


def _exclusion_reason(weights: Weights, prefix: str) -> str | None:
    try:
        return weights.loader.left_out(prefix)
    except (MismatchError, ConfigError):  # an invalid entry does not concern a plain layer
        return None


def _is_symmetric(storage: WeightStorage, layer: LayerDescription) -> bool | None:
    """Return whether all zero points are the middle, as stored, else by the config; None if unknown."""
    config = layer.format.config
    if not isinstance(config, Grouped):
        return None
    if zero_point_convention(layer) is not None:
        return _has_middle_zeros(storage, layer)
    if isinstance(layer.format.config, AWQConfig | MarlinConfig | Marlin24Config):
        return True  # without stored zero points these formats are symmetric
    stated: bool | None = getattr(config, "symmetric", None)
    return stated


def _has_middle_zeros(storage: WeightStorage, layer: LayerDescription) -> bool:
    stored = zero_point_convention(layer)
    assert stored is not None
    middle, name = middle_words(*stored, layer.N), layer.names.full("qzeros")
    runs = row_runs(storage.info(name))
    return all(bool((read_array(storage, name, (run,)) == middle).all()) for run in runs)


def _has_act_order(layer: LayerDescription) -> bool | None:
    """Return whether an index of groups differs from ascending order; False without an index."""
    config = layer.format.config
    if not isinstance(config, Grouped):
        return None
    indices = [layer.facts[spec.name] for spec in layer.specs if spec.index_of and spec.name in layer.facts]
    return any(not config.is_in_order(index, layer.K) for index in indices)


@checked
def layers(path_or_weights: str | PathLike[str] | Weights) -> list[LayerInfo]:
    """List the layers of a checkpoint by name, without reading weights.

    Headers are read, and the small tensors that describe a layer: `g_idx`, and zero points of GPTQ and AWQ. A
    layer that cannot be loaded is listed with its `error`. Biases and tensors outside of layers are not
    listed.

    Parameters
    ----------
    path_or_weights
        A safetensors file, a directory, a sharded index, or a result of `open_checkpoint`, which stays open.
        A layer that its loader repacks or quantizes is described as stored; `target` names the result.

    Raises
    ------
    StorageError, ConfigError, UnsupportedFormatError
        The path cannot be opened; see `open_checkpoint`.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, Weights, layers, loader_from_config
    >>> words, scales = torch.zeros(8, 64, dtype=torch.int32), torch.ones(2, 64).half()
    >>> tensors = {"up.qweight": words, "up.qzeros": words[:2, :8], "up.scales": scales,
    ...            "up.g_idx": torch.arange(64).int() // 32, "norm.weight": torch.ones(64)}
    >>> config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    >>> weights = Weights(MemoryStorage(tensors), loader=loader_from_config(config, target="marlin"))
    >>> [(layer.prefix, layer.format, layer.shape, layer.target) for layer in layers(weights)]
    [('norm', 'unquantized', (64,), None), ('up', 'gptq', (64, 64), 'gptq_marlin')]
    """
    with opened(path_or_weights) as (weights, _):
        index = LayerIndex(weights)
        return [
            info_of_broken(index, prefix, layer) if isinstance(layer, QloadError) else info_of(weights, layer)
            for prefix, layer in index.layers.items()
        ]


Progress = Callable[[str, int, int], None]  # stage, bytes done, total bytes


@checked
def load_layers(weights: Weights, *, progress: Progress | None = None) -> Iterator[tuple[str, Weight]]:
    """Yield each layer of a checkpoint with its prefix, whole, on the device and in the order of `weights`.

    The fastest load of a whole model: threads read the next layers during the repacking of one; see
    `Weights.stream`, also for loads of shares. Layers are sorted by name and include vectors such as norms.
    The error of a layer is raised at its turn. UnreadTensorsError before any load: no format reads a tensor.

    Parameters
    ----------
    weights
        Result of `open_checkpoint`.
    progress
        Called with "loading", the bytes loaded so far, and the bytes of all layers.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, Weights, load_layers, loader_from_config
    >>> storage = MemoryStorage({"norm.weight": torch.ones(4), "up.weight": torch.ones(8, 4)})
    >>> weights = Weights(storage, loader=loader_from_config(None))
    >>> {prefix: weight.shape for prefix, weight in load_layers(weights)}
    {'norm': (4,), 'up': (8, 4)}
    """
    index = LayerIndex(weights)
    error = account(index).error()
    if error is not None:
        raise error
    return _with_progress(weights, index, progress) if progress else weights.stream(index.found)


def _with_progress(weights: Weights, index: LayerIndex, progress: Progress) -> Iterator[tuple[str, Weight]]:
    info = weights.storage.info
    sizes = {prefix: sum(info(name).nbytes for name in index.under(prefix)) for prefix in index.found}
    done, total = 0, sum(sizes.values())
    progress("loading", done, total)
    for prefix, weight in weights.stream(index.found):
        done += sizes[prefix]
        progress("loading", done, total)
        yield prefix, weight
