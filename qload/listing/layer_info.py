"""Descriptions of a checkpoint's layers, before any weight is read, and a load of all layers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from os import PathLike

import torch

from qload.errors import ConfigError, MismatchError, QloadError, checked
from qload.formats import AWQConfig, Marlin24Config, MarlinConfig
from qload.listing.coverage import account
from qload.listing.layer_index import Groups
from qload.listing.zero_points import convention, symmetric
from qload.loader import LayerDescription
from qload.spec import ActivationScheme, Config, Grouped, LayerClaims, Role, Weight
from qload.storage import TensorInfo, WeightStorage
from qload.weights import Weights, open_checkpoint


@dataclass(frozen=True)
class LayerInfo:
    """A layer of a checkpoint, from headers, `g_idx` and zero points.

    Attributes
    ----------
    prefix
        What `get_weights` takes.
    format
        The name of the checkpoint format that it is stored in; None where it is stored in none.
    bits
        Of a code; None where a format has no codes, or not one width.
    group_size
        Inputs that share a scale; -1: all of them; None where a format has no groups.
    sym
        Whether every zero point is the middle, as those that are stored say, or else the config.
    act_order
        Whether groups lie in another order than the inputs.
    shape
        (N, K); (N,) of a vector; () where it is not known.
    expected
        The (N, K) that the model's config says, where its type is known.
    dtype
        Of the stored weight, where that is plain, FP8 or FP4; of the scales, where codes are integers.
    bytes
        Of `tensors`.
    config
        The layer's own config, as its typed weight has it.
    tensors
        What a load reads, by full names. A bias is no part of it.
    activations
        How the config declares that its inputs are quantized, with the whole names of a stored scale and
        zero point; None where it declares nothing.
    excluded
        Why the config leaves out a plain layer: which entry of which key; None where it does not.
    target
        The kernel format that the loader makes of it, as far as its type tells; None: it is left as stored.
    scale_dtype
        Of the scales; None where there are none.
    claims
        What the config claims about this layer, by the entry that applies to its module; None: nothing.
    error
        Why it cannot be loaded; then `tensors` are all under the prefix, and the rest is empty.
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
        """Whether it is stored as plain floats."""
        return self.format == "unquantized"


def info_of(weights: Weights, layer: LayerDescription) -> LayerInfo:
    """All that is known of a layer that can be loaded."""
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
        target=weights.loader.made(layer, weights.device),
        scale_dtype=scale_dtype,
        expected=weights.architecture.expected(layer.prefix)
        if weights.architecture and "K" in layer.sizes
        else None,
        claims=layer.format.claims,
    )


def info_of_broken(groups: Groups, prefix: str, error: QloadError) -> LayerInfo:
    """What is known of a layer that cannot be loaded."""
    storage = groups.weights.storage
    tensors = {name: storage.info(name) for name in groups.under(prefix)}
    held = sum(info.nbytes for info in tensors.values())
    return LayerInfo(prefix, None, None, None, None, None, (), "", held, tensors=tensors, error=error)


def _dtypes(layer: LayerDescription) -> tuple[str, str | None]:
    """What `LayerInfo` says of the weight, and of the scales, by name.

    Integers say nothing of the dtype that a product is computed in, and scales of a byte do not either.
    """
    roles = {spec.role: layer.dtypes[spec.name] for spec in reversed(layer.specs)}  # the first of each role
    stored = roles.get(Role.FLOAT, roles.get(Role.WORD))
    scales = roles.get(Role.SCALE, stored)
    assert stored is not None  # every layer has a weight
    assert scales is not None
    kept = stored if stored.is_floating_point or scales.itemsize == 1 else scales
    return _dtype_name(kept), _dtype_name(scales) if Role.SCALE in roles else None


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _activations(layer: LayerDescription) -> ActivationScheme | None:
    """What the config declares, with the whole names of the scale and the zero point that are stored."""
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
    except (MismatchError, ConfigError):  # of a plain layer, a config that nobody understands says nothing
        return None


def _is_symmetric(storage: WeightStorage, layer: LayerDescription) -> bool | None:
    """What the zero points say, where their reading is known; else what the config says, if it does."""
    config = layer.format.config
    if not isinstance(config, Grouped):
        return None
    if convention(layer) is not None:
        return all(same for _, _, same in symmetric(storage, layer))
    if isinstance(layer.format.config, AWQConfig | MarlinConfig | Marlin24Config):
        return True  # of these, what stores no zero points means the middle
    said: bool | None = getattr(config, "symmetric", None)
    return said


def _has_act_order(layer: LayerDescription) -> bool | None:
    """Whether some index of groups differs from their order; without an index they lie in order."""
    config = layer.format.config
    if not isinstance(config, Grouped):
        return None
    indices = [layer.facts[spec.name] for spec in layer.specs if spec.index_of and spec.name in layer.facts]
    return any(not bool((index == config.in_order(layer.K)).all()) for index in indices)


@checked
def layers(path_or_weights: str | PathLike[str] | Weights) -> list[LayerInfo]:
    """Every layer of a checkpoint, in the order of their names, and no weight is read.

    Headers are, and the small tensors that say what a layer is: `g_idx`, and the zero points of GPTQ and AWQ.
    A layer that cannot be loaded is listed with its `error`. A bias, and what is no layer, is not listed.

    Parameters
    ----------
    path_or_weights
        A safetensors file, a directory, or a sharded index; or what `open_checkpoint` made of one, which
        stays open. What its loader repacks or quantizes while loading is described as it is stored, and
        `target` says what the loader makes of it.

    Raises
    ------
    StorageError, ConfigError, UnsupportedFormatError
        As `open_checkpoint`, where the path cannot be opened.

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
    with _opened(path_or_weights) as weights:
        groups = Groups(weights)
        return [
            info_of_broken(groups, prefix, layer)
            if isinstance(layer, QloadError)
            else info_of(weights, layer)
            for prefix, layer in groups.layers.items()
        ]


@contextmanager
def _opened(path_or_weights: str | PathLike[str] | Weights) -> Iterator[Weights]:
    if isinstance(path_or_weights, Weights):
        yield path_or_weights
    else:
        with open_checkpoint(path_or_weights) as weights:
            yield weights


Progress = Callable[[str, int, int], None]  # a stage, bytes that are done, bytes of all


@checked
def load_layers(weights: Weights, *, progress: Progress | None = None) -> Iterator[tuple[str, Weight]]:
    """Each layer of a checkpoint with its prefix, whole, on the device and in the order that `weights` say.

    The fastest way to load a model that is not cut: threads read the next layers while one is repacked, see
    `Weights.stream`, which takes loads of shares too. Layers come in the order of their names, vectors such
    as norms among them; a layer that cannot be loaded is an error when it is its turn.
    UnreadTensorsError, before anything is loaded, where a tensor is in a form that no format reads.

    Parameters
    ----------
    weights
        What `open_checkpoint` made.
    progress
        Told "loading", the bytes that were loaded, and those of all layers.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, Weights, load_layers, loader_from_config
    >>> storage = MemoryStorage({"norm.weight": torch.ones(4), "up.weight": torch.ones(8, 4)})
    >>> weights = Weights(storage, loader=loader_from_config(None))
    >>> {prefix: weight.shape for prefix, weight in load_layers(weights)}
    {'norm': (4,), 'up': (8, 4)}
    """
    groups = Groups(weights)
    error = account(groups).error()
    if error is not None:
        raise error
    return _with_progress(weights, groups, progress) if progress else weights.stream(groups.found)


def _with_progress(weights: Weights, groups: Groups, progress: Progress) -> Iterator[tuple[str, Weight]]:
    info = weights.storage.info
    sizes = {prefix: sum(info(name).nbytes for name in groups.under(prefix)) for prefix in groups.found}
    done, total = 0, sum(sizes.values())
    progress("loading", done, total)
    for prefix, weight in weights.stream(groups.found):
        done += sizes[prefix]
        progress("loading", done, total)
        yield prefix, weight
