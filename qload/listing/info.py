"""One layer as its tensors say it is, and as the config claims it: all that is known before a load."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from qload.errors import ConfigError, MismatchError, QloadError
from qload.formats import AWQConfig, Marlin24Config, MarlinConfig
from qload.listing.groups import Groups
from qload.listing.zero_points import convention, symmetric
from qload.loader import LayerDescription
from qload.spec import ActivationScheme, Config, Grouped, LayerClaims, Role
from qload.storage import TensorInfo, WeightStorage
from qload.weights import Weights


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
        sym=_symmetric(storage, layer),
        act_order=_act_order(layer),
        shape=(layer.N, layer.K) if "K" in layer.sizes else (layer.N,),
        dtype=dtype,
        bytes=sum(info.nbytes for info in tensors.values()),
        config=config,
        tensors=tensors,
        activations=_activations(layer),
        excluded=_excluded(weights, layer.prefix) if plain else None,
        target=weights.loader.made(layer, weights.device),
        scale_dtype=scale_dtype,
        expected=weights.architecture.expected(layer.prefix)
        if weights.architecture and "K" in layer.sizes
        else None,
        claims=layer.format.claims,
    )


def broken(groups: Groups, prefix: str, error: QloadError) -> LayerInfo:
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
    return _called(kept), _called(scales) if Role.SCALE in roles else None


@cache
def _called(dtype: torch.dtype) -> str:
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


def _excluded(weights: Weights, prefix: str) -> str | None:
    try:
        return weights.loader.left_out(prefix)
    except (MismatchError, ConfigError):  # of a plain layer, a config that nobody understands says nothing
        return None


def _symmetric(storage: WeightStorage, layer: LayerDescription) -> bool | None:
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


def _act_order(layer: LayerDescription) -> bool | None:
    """Whether some index of groups differs from their order; without an index they lie in order."""
    config = layer.format.config
    if not isinstance(config, Grouped):
        return None
    indices = [layer.facts[spec.name] for spec in layer.specs if spec.index_of and spec.name in layer.facts]
    return any(not bool((index == config.in_order(layer.K)).all()) for index in indices)
