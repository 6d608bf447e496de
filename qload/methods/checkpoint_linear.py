"""Linear layers loaded from a checkpoint: modules of a rank's share with their biases, and `replace_linears`.

    layer = ColumnParallelLinear.load(weights, "model.layers.0.mlp.up_proj")
    y = layer(x)

Parts of a fused layer that are stored in different formats become several products with joined outputs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qload.checkpoint import check_all_read
from qload.errors import ArgumentError, CutError, DtypeError, MismatchError, ShapeError, check_type, checked
from qload.formats.unquantized import FLOATS
from qload.kernels.declared import Activations, Maximum
from qload.kernels.dtypes import DTYPES
from qload.loader import LayerDescription, LoadPlan, Part, Split
from qload.loader.description import check_alike
from qload.methods.base import LinearMethodBase
from qload.methods.parameters import short_name
from qload.parallel import ProcessGroup, ReducingGroup, maximum_over
from qload.parallel.process_group import torch_group
from qload.spec import Layer, Role, Weight, named
from qload.weights import Weights
from qload.weights.weights import check_heads

LinearFactory = Callable[[Weight, Tensor | None, Maximum], nn.Module]
Names = Mapping[str, str] | Callable[[str], str | None] | None


class LoadedLinearMethod(LinearMethodBase):
    """Method of a layer with `typed_linear`, a loaded module that multiplies and adds the bias."""

    def create_weights(self, layer: nn.Module, *sizes: Any, **attrs: Any) -> None:
        """Raise ArgumentError, whatever `sizes` and `attrs` are: the layer is already loaded."""
        raise ArgumentError("quant_method", "a method for layers not loaded yet", type(self).__name__)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> (..., N), in the dtype of x, by `layer`; `bias` (N,) or its own."""
        linear: nn.Module = layer.typed_linear  # type: ignore[assignment]
        y: Tensor = linear(x) if bias is None else linear(x, bias)
        return y


class JoinedLinear(nn.Module):
    """Linear layers with the same inputs and joined outputs.

    Parameters
    ----------
    linears
        Modules (..., K) -> (..., N), in order.
    widths
        N of each, to split a bias for all of them.
    """

    def __init__(self, linears: Sequence[nn.Module], widths: Sequence[int] = ()) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.widths = tuple(widths)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute all outputs of x (..., K); `bias` (N of all layers,) is added in the products."""
        if bias is None:
            return torch.cat([linear(x) for linear in self.linears], -1)
        pairs = zip(self.linears, torch.split(bias, list(self.widths)), strict=True)
        return torch.cat([linear(x, own_bias) for linear, own_bias in pairs], -1)


@dataclass(frozen=True)
class LoadedLinear:
    """Loaded module of a linear layer, with its sizes.

    Attributes
    ----------
    linear
        Module (..., K) -> (..., N).
    shape
        (N, K) of this rank's share.
    whole
        (N, K) of the whole layer.
    parts
        This rank's outputs of each part.
    """

    linear: nn.Module
    shape: tuple[int, int]
    whole: tuple[int, int]
    parts: tuple[int, ...]


def load_linear(
    weights: Weights, parts: Sequence[Part], split: Split | None, make: LinearFactory | None
) -> LoadedLinear:
    """Load the `parts` of a layer as a module, with biases cut alike.

    All layers are described, and all biases checked, before a weight is read; errors are those of a load.
    """
    has_bias = check_biases(weights, parts)
    loaded: list[tuple[Weight, Tensor | None]] = []
    plans = [plan for run in _equal_runs(weights, parts) for plan in plan_linear(weights, run, split)]
    for run, plan in plans:
        weight = plan.finish(weights)
        loaded.append((weight, read_bias(weights, run, weight, split) if has_bias else None))
    return build_linear(weights, loaded, make)


def plan_linear(weights: Weights, run: list[Part], split: Split | None) -> list[tuple[list[Part], LoadPlan]]:
    """Plan the load of a `run` of parts of `weights`, along `split`; no weight is read.

    The parts are joined, or one by one if one of them ends inside of a block of its scales. Errors are those
    of a load.
    """
    try:
        return [(run, weights.loader.plan(weights, run, split))]
    except CutError:
        if len(run) == 1:
            raise
        return [([part], weights.loader.plan(weights, [part], split)) for part in run]


def build_linear(
    weights: Weights, loaded: Sequence[tuple[Weight, Tensor | None]], make: LinearFactory | None
) -> LoadedLinear:
    """Build one module from weights with the same inputs, each with its bias; `make` None: `get_linear`."""
    dtype, group = weights.dtype if weights.dtype in DTYPES else None, weights.process_group

    def get_linear(weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
        return weight.get_linear(bias, maximum=maximum, dtype=dtype)

    linears = [
        (make or get_linear)(weight, bias, maximum_for(weight.layer, group)) for weight, bias in loaded
    ]
    layers = [weight.layer for weight, _ in loaded]
    widths = tuple(width for layer in layers for width in layer.parts)
    return LoadedLinear(
        linears[0] if len(linears) == 1 else JoinedLinear(linears, [layer.N for layer in layers]),
        (sum(widths), layers[0].K),
        (sum(layer.whole[0] for layer in layers), layers[0].whole[1]),
        widths,
    )


def equal_parts(weights: Weights, prefixes: Sequence[str]) -> list[Part]:
    """Return parts with an equal share for each rank; DivideError if a share ends inside of a head."""
    check_heads(weights, prefixes)
    return [Part(prefix) for prefix in prefixes]


def _equal_runs(weights: Weights, parts: Sequence[Part]) -> list[list[Part]]:
    """Group neighbours with the same format before and after the load.

    MismatchError for layers with different inputs.
    """
    if len({part.prefix for part in parts}) == 1:
        return [list(parts)]
    runs: list[list[Part]] = []
    last: LayerDescription | None = None
    for part in parts:
        layer = weights.loader.describe(weights, part.prefix)
        if last is not None and layer.K != last.K:
            check_alike([last, layer])
        if last is not None and _has_equal_format(weights, last, layer):
            runs[-1].append(part)
        else:
            runs.append([part])
        last = layer
    return runs


def _has_equal_format(weights: Weights, first: LayerDescription, other: LayerDescription) -> bool:
    try:
        check_alike([first, other])
    except MismatchError:
        return False
    loader, device = weights.loader, weights.device
    return loader.made(first, device) == loader.made(other, device)


def maximum_for(layer: Layer, group: ProcessGroup) -> Maximum:
    """Return a function for the largest input of all ranks, for a share of inputs with one scale over all.

    None for other layers, and for a group that cannot reduce: then the layer's own error tells what it needs.
    """
    scheme = layer.activations
    if scheme is None or not scheme.finds_maxima or layer.whole[1] == layer.K:
        return None
    reduces = isinstance(group, ReducingGroup) or torch_group(group) is not None
    return maximum_over(group) if reduces else None


def has_bias_tensor(weights: Weights, prefix: str) -> bool:
    """Return whether a layer is stored with a bias."""
    return weights.has_tensor(named(prefix, "bias"))


def check_biases(weights: Weights, parts: Sequence[Part]) -> bool:
    """Return whether one of the parts has a bias; ShapeError or DtypeError for an invalid one."""
    prefixes = [part.prefix for part in parts if has_bias_tensor(weights, part.prefix)]
    for prefix in dict.fromkeys(prefixes):
        check_bias_tensor(weights, prefix, weights.loader.shape(weights, prefix)[0])
    return bool(prefixes)


def check_bias_tensor(weights: Weights, prefix: str, N: int) -> bool:
    """Return whether there is a bias; ShapeError or DtypeError unless it has N plain floats."""
    if not has_bias_tensor(weights, prefix):
        return False
    name = named(prefix, "bias")
    info = weights.info(name)
    if info.shape != (N,):
        raise ShapeError(name, f"({N},) = (N,)", info.shape, info.file)
    if info.stored_dtype not in FLOATS:
        raise DtypeError(name, [dtype.name for dtype in FLOATS], short_name(info.dtype), info.file)
    return True


def read_bias(weights: Weights, parts: Sequence[Part], weight: Weight, split: Split | None) -> Tensor | None:
    """Read this rank's bias (outputs of `weight`,), with 0 for a part without one; None without any bias.

    For a split along the inputs, rank 0 has the whole bias, and the others none.
    """
    names = [named(part.prefix, "bias") for part in parts if has_bias_tensor(weights, part.prefix)]
    if not names:
        return None
    weights.take(dict.fromkeys(names))
    if split == "K" and weights.process_group.rank():
        return None
    widths = weight.layer.parts
    shares = [_bias_share(weights, part, width, split) for part, width in zip(parts, widths, strict=True)]
    first = next(share for share in shares if share is not None)
    filled = [
        first.new_zeros(width) if share is None else share
        for share, width in zip(shares, widths, strict=True)
    ]
    return filled[0] if len(filled) == 1 else torch.cat(filled)


def _bias_share(weights: Weights, part: Part, width: int, split: Split | None) -> Tensor | None:
    """Read this rank's share of a part's bias, as wide as its share of the weight."""
    if not has_bias_tensor(weights, part.prefix):
        return None
    name = named(part.prefix, "bias")
    start, stop = part.start, weights.get_shape(name)[0] if part.stop is None else part.stop
    if split == "N":
        group = weights.process_group
        number, last = group.rank() // part.copies, group.size() // part.copies - 1
        start = start + number * width if number < last else stop - width  # the last share may be short
        stop = start + width
    return weights.read(name, (slice(start, stop),), role=Role.FLOAT)


@checked
def replace_linears(
    model: nn.Module, weights: Weights, names: Names = None, *, activations: Activations = "declared"
) -> list[str]:
    """Replace each `torch.nn.Linear` of a model that is stored quantized by a loaded layer; return the names.

    Biases are loaded with their layers. Plain layers, norms and embeddings stay, for the loader of the rest
    of the model. A layer shared by two modules stays shared. A model on device "meta" takes no memory before
    its layers are replaced.

    Parameters
    ----------
    model
        Any module; its linear layers are replaced in place.
    weights
        An open checkpoint. Layers are put on its device, and repacked by its loader; every rank of a process
        group gets the whole layer.
    names
        The checkpoint's prefix of a layer by its name in the model: a dict, or a function that returns None
        to keep a layer; None: the same names.
    activations
        "declared": inputs are quantized if the checkpoint declares it; "unquantized": never.

    Returns
    -------
    list of str
        Names of the replaced layers in the model. `weights.report()` lists the checkpoint's unused tensors.

    Raises
    ------
    ArgumentError
        If a dict has a layer that the model lacks, or a prefix that is not stored.
    ShapeError
        If a layer has other sizes than the model's; then no layer was replaced.
    UnreadTensorsError
        If no format reads a tensor; then no layer was replaced.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, Weights, loader_from_config, replace_linears
    >>> tensors = {"up.weight": torch.ones(64, 32).to(torch.float8_e4m3fn), "up.weight_scale": torch.ones(1)}
    >>> weights = Weights(MemoryStorage(tensors), loader=loader_from_config({"quant_method": "fp8"}))
    >>> model = torch.nn.ModuleDict({"up": torch.nn.Linear(32, 64, bias=False)})
    >>> replace_linears(model, weights, activations="unquantized")
    ['up']
    >>> model["up"](torch.ones(32))[0]
    tensor(32.)
    """
    check_type("model", model, nn.Module)
    check_type("weights", weights, Weights)
    linears: dict[nn.Linear, list[str]] = {}  # a shared layer has several names
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            linears.setdefault(module, []).append(name)
    check_all_read(weights)
    replaced = dict(_quantized_linears(linears, weights, names))
    for prefix, linear in replaced.items():
        expected, stored = (linear.out_features, linear.in_features), weights.loader.shape(weights, prefix)
        if stored != expected:
            name = linears[linear][0]
            raise ShapeError(prefix, f"{expected} = (N, K), as {name} of the model has it", stored)
    for prefix, weight in weights.stream(replaced):
        parts = [Part(prefix)]
        bias = read_bias(weights, parts, weight, None) if check_biases(weights, parts) else None
        loaded = weight.get_linear(bias, activations=activations, dtype=weights.dtype)
        for name in linears[replaced[prefix]]:
            model.set_submodule(name, loaded)
    return sorted(name for linear in replaced.values() for name in linears[linear])


def _quantized_linears(
    linears: Mapping[nn.Linear, list[str]], weights: Weights, names: Names
) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the prefix and the module of each layer that is quantized after its load."""
    by_dict = isinstance(names, Mapping)
    known = {name for own_names in linears.values() for name in own_names}
    wrong = sorted(names.keys() - known) if isinstance(names, Mapping) else []
    if wrong:
        raise ArgumentError("names", "linear layers of the model", ", ".join(wrong))
    for linear, own_names in linears.items():
        for name in own_names:
            prefix = names.get(name) if isinstance(names, Mapping) else names(name) if names else name
            if prefix is None:
                continue
            if not weights.names_under(f"{prefix}."):
                if by_dict:
                    raise ArgumentError("names", "stored layers", prefix)
                continue
            layer = weights.loader.describe(weights, prefix)
            plain = layer.format.weight_type.plain
            if not plain or weights.loader.made(layer, weights.device) is not None:
                yield prefix, linear
                break
