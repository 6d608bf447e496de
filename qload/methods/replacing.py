"""`replace_linears`: the layers of anybody's model, exchanged for those of a checkpoint in any format."""

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from qload.errors import ArgumentError, ShapeError, check_type, checked
from qload.kernels.declared import Activations
from qload.listing import check_all_read
from qload.loader import Part
from qload.methods.biases import check_biases, read_bias
from qload.weights import Weights

Names = Mapping[str, str] | Callable[[str], str | None] | None


@checked
def replace_linears(
    model: nn.Module, weights: Weights, names: Names = None, *, activations: Activations = "declared"
) -> list[str]:
    """Put a layer of qload in the place of each `torch.nn.Linear` that is stored quantized; say which.

    Biases come with their layers. Plain layers, norms and embeddings stay for who loads the rest of the
    model, and so does a layer that is shared by two modules. A model on device "meta" takes no memory
    before its layers are replaced.

    Parameters
    ----------
    model
        Any module; its linear layers are exchanged where they stand.
    weights
        What `open_checkpoint` made. Layers are put on its device, and repacked as its loader does; on a rank
        of a process group each is whole.
    names
        What the checkpoint calls a layer that the model calls so: a dict, or a function that returns None for
        a layer to leave alone; None: the same.
    activations
        "declared": inputs are quantized where the checkpoint declares it; "unquantized": never.

    Returns
    -------
    list of str
        The names of the layers that were replaced, as the model has them. Of the checkpoint's tensors,
        `weights.report()` tells which nothing has used.

    Raises
    ------
    ArgumentError
        Where a dict names a layer that the model has not, or a checkpoint's layer that is not stored.
    ShapeError
        Where a layer has other sizes than the model's; then nothing was replaced.
    UnreadTensorsError
        Where a tensor is in a form that no format reads, before anything is replaced.

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
    homes: dict[nn.Linear, list[str]] = {}  # a layer that several modules share has several
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            homes.setdefault(module, []).append(name)
    check_all_read(weights)
    found = dict(_quantized(homes, weights, names))
    for prefix, linear in found.items():
        expected, whole = (linear.out_features, linear.in_features), weights.loader.shape(weights, prefix)
        if whole != expected:
            raise ShapeError(prefix, f"{expected} = (N, K), as {homes[linear][0]} of the model has it", whole)
    for prefix, weight in weights.stream(found):
        parts = [Part(prefix)]
        bias = read_bias(weights, parts, weight, None) if check_biases(weights, parts) else None
        made = weight.get_linear(bias, activations=activations, dtype=weights.dtype)
        for name in homes[found[prefix]]:
            model.set_submodule(name, made)
    return sorted(name for linear in found.values() for name in homes[linear])


def _quantized(
    homes: Mapping[nn.Linear, list[str]], weights: Weights, names: Names
) -> Iterator[tuple[str, nn.Linear]]:
    """Each linear layer, under any of its names, with its prefix, that is not plain once it is loaded."""
    there = {name for own in homes.values() for name in own}
    wrong = sorted(names.keys() - there) if isinstance(names, Mapping) else []
    if wrong:
        raise ArgumentError("names", "linear layers of the model", ", ".join(wrong))
    for linear, own in homes.items():
        for name in own:
            prefix = _prefix(name, names)
            if prefix is None or not _is_stored(weights, prefix, isinstance(names, Mapping)):
                continue
            layer = weights.loader.describe(weights, prefix)
            plain = layer.format.weight_type.plain
            if not plain or weights.loader.made(layer, weights.device) is not None:
                yield prefix, linear
                break


def _prefix(name: str, names: Names) -> str | None:
    if names is None:
        return name
    return names.get(name) if isinstance(names, Mapping) else names(name)


def _is_stored(weights: Weights, prefix: str, named: bool) -> bool:
    """Whether a layer of this prefix is stored; ArgumentError where it is not, and the caller `named` it."""
    stored = bool(weights.names_under(f"{prefix}."))
    if named and not stored:
        raise ArgumentError("names", "layers that are stored", prefix)
    return stored
