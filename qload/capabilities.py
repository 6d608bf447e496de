"""Capabilities of qload for each format, derived from the declarations of formats."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from math import lcm

import torch

from qload.checkpoint import format_label
from qload.detect.config_reader import described_formats
from qload.detect.methods import METHODS
from qload.dtypes import TORCH
from qload.experts.declared_stacks import stack_endings
from qload.experts.stack_finder import find_stacks
from qload.experts.stack_layouts import BLOCKS, BYTES_OF_BLOCK, FIELDS
from qload.formats import FORMATS
from qload.kernel_formats import PanelsWeight
from qload.kernel_formats.panels import CODE_BITS
from qload.kernel_formats.repack import can_restore, targets
from qload.kernels.cpu import ROW_TYPES
from qload.quantize import QUANTIZERS
from qload.repacking.loaders import READ_AS_STORED
from qload.spec import Config, Role, TensorSpec, Weight
from qload.storage import MemoryStorage

LARGE = {"N": 1 << 14, "K": 1 << 14}  # sizes that every packing divides
LEAD, STACK = "model.layers.0.mlp.", "experts.down_proj"  # of all experts of a layer
SIZES = {"num_experts": 1, "hidden_size": LARGE["N"], "moe_intermediate_size": LARGE["K"]}
MARKDOWN = {  # heading of the page's table -> column, and text that its cells leave out
    "tensors": ("load", "from "),
    "`quant_method`": ("detect", ""),
    "cut of N": ("shard column", "at "),
    "cut of K": ("shard row", "at "),
    "`repack` to": ("repack to", ""),
    "CPU kernel": ("kernel of a CPU", ""),
}
INTRODUCTION = """\
This table shows the formats of layers with N outputs and K inputs. `qload formats --markdown` prints it from
the code. `qload formats` prints more, with reasons: fused layers, experts, restored tensors, quantizers,
activations, checked values.

- **tensors**: the stored tensors of a layer, without optional ones.
- **`quant_method`**: the methods of config.json that lead to this format.
- **cut of N**, **cut of K**: lawful cuts for tensor parallelism (`get_weights_col`, `get_weights_row`).
- **`repack` to**: kernel formats. A weight that one cannot hold exactly is refused. `marlin` is the order of
  Marlin's kernels; the format of files is `marlin_checkpoint`, "marlin" in configs.
- **CPU kernel**: the way of the CPU module; "no" means dequantize, then torch's product.

All formats are dequantized, and loaded as fused layers such as q, k and v. See also [other
readers](readers.md)."""


@dataclass(frozen=True)
class Capability:
    """Answer yes or no, with the way or the reason."""

    yes: bool
    text: str = ""

    def __str__(self) -> str:
        return f"{'yes' if self.yes else 'no'}{': ' * bool(self.text)}{self.text}"


def overview() -> Mapping[str, Mapping[str, Capability]]:
    """Map format -> column -> Capability for all formats, each with its example config."""
    return {weight_type.format: _row(weight_type) for weight_type in FORMATS}


def as_markdown() -> str:
    """Format the page of the documentation: a table with a row for each format."""
    lines = [("format", *MARKDOWN), ("---",) * (1 + len(MARKDOWN))]
    for name, row in overview().items():
        cells = (_short(row[column], dropped) for column, dropped in MARKDOWN.values())
        lines.append((format_label(name), *cells))
    table = "".join(f"|{'|'.join(line)}|\n" for line in lines)
    return f"# Formats\n\n{INTRODUCTION}\n\n{table}"


def _short(cell: Capability, dropped: str) -> str:
    """Shorten a cell: no example and no details; "no" without the reason."""
    if not cell.yes:
        return "no"
    text = cell.text.partition("; for example")[0].partition(", where")[0].partition(", rows of")[0]
    return text.removeprefix(dropped).replace(f"; {dropped}", "; ")


def _row(weight_type: type[Weight]) -> dict[str, Capability]:
    """Return column -> Capability of one format."""
    specs, plain = weight_type.tensors(weight_type.example), weight_type.plain
    methods = [name for name in METHODS if weight_type in described_formats(name)]
    layouts, quantizer = targets(weight_type), QUANTIZERS.get(weight_type.format)
    tensors = ", ".join(spec.suffix for spec in specs if not spec.optional)
    no_quantizer = "it is not quantized" if plain else "there is no quantizer for it"
    equal = [spec.name for spec in specs if spec.joined() is None and not spec.spent]
    return {
        "load": Capability(True, f"from {tensors}; for example {_config_text(weight_type.example)}"),
        "detect": Capability(True, "where config.json has no quant_method" if plain else ", ".join(methods)),
        "dequantize": Capability(True),
        "shard column": _cut(weight_type, "N"),
        "shard row": _cut(weight_type, "K"),
        "fused": Capability(True, f"if the layers have the same {' and '.join(equal)}" if equal else ""),
        "experts": _experts(weight_type, layouts),
        "experts in stacks": _stacks(weight_type, specs),
        "repack to": Capability(bool(layouts), _repack_text(weight_type, layouts)),
        "kernel of a CPU": _cpu_kernel(weight_type, layouts),
        "restore": Capability(True)
        if can_restore(weight_type)
        else Capability(False, "weights of this format are not repacked"),
        "quantize while loading": Capability(bool(quantizer), getattr(quantizer, "__name__", no_quantizer)),
        "activations": _activations(weight_type, specs, methods),
        "verify": Capability(True, f"the shapes of all tensors, and the values of {_checked_tensors(specs)}"),
    }


def _repack_text(weight_type: type[Weight], layouts: Sequence[str]) -> str:
    """Names of layouts; if some configs have none, also the configs with layouts."""
    configs = (weight_type.example, *weight_type.further)
    repacked = [config for config in configs if targets(weight_type, config)]
    if len(repacked) in (0, len(configs)):
        return ", ".join(layouts) or _why_no_layout(weight_type)
    return f"{', '.join(layouts)}, where the config is {' or '.join(map(_config_text, repacked))}"


def _cpu_kernel(weight_type: type[Weight], layouts: Sequence[str]) -> Capability:
    if weight_type.plain:
        return Capability(False, "torch's own product")
    if issubclass(weight_type, ROW_TYPES) and PanelsWeight.example.name not in layouts:
        return Capability(True, "as it is stored, rows of codes")
    if PanelsWeight.example.name not in layouts or weight_type in READ_AS_STORED["marlin"]:
        return Capability(False, "it is dequantized, then torch's product")
    bits = f"{', '.join(map(str, CODE_BITS[:-1]))} or {CODE_BITS[-1]}"
    return Capability(True, f"repacked to {PanelsWeight.example.name}, where codes have {bits} bits")


def _cut(weight_type: type[Weight], dim: str) -> Capability:
    """Lawful cuts of a dimension, for each config with other cuts than the configs before it."""
    configs: dict[Capability, Config] = {}
    for config in (weight_type.example, *weight_type.further):
        configs.setdefault(_cut_of(weight_type, config, dim), config)
    if len(configs) == 1:
        return next(iter(configs))
    lawful = {cell.text: config for cell, config in configs.items() if cell.yes}
    return Capability(True, "; ".join(f"{cut} with {_config_text(config)}" for cut, config in lawful.items()))


def _cut_of(weight_type: type[Weight], config: Config, dim: str) -> Capability:
    bound = [
        (spec, axis)
        for spec in weight_type.tensors(config)
        for axis in spec.binding
        if axis.follows(dim) and axis.free is None
    ]
    never = [spec.name for spec, axis in bound if axis.step(dim, LARGE) == 0]
    if never:
        return Capability(False, f"{never[0]} stores the inputs of the whole layer in an order of their own")
    step = lcm(*(axis.step(dim, LARGE) for _, axis in bound if not axis.flat))
    flat = lcm(*(axis.granule for _, axis in bound if axis.flat))
    if flat > 1:
        each = f"n where n * K is a multiple of {flat}"
        return Capability(True, f"at {each}" if dim == "N" else f"at multiples of {flat}, if K is one too")
    return Capability(True, f"at multiples of {step}" if step > 1 else "anywhere")


def _activations(
    weight_type: type[Weight], specs: Sequence[TensorSpec], methods: Sequence[str]
) -> Capability:
    """Methods with a key for quantized inputs, and the stored tensors of inputs."""
    keys = [
        f"{method.activation_key} ({name})"
        for name, method in METHODS.items()
        if weight_type in method.formats_with_activations
    ]
    if not keys:
        return Capability(False, f"no key of {' and '.join(methods)} says that they are quantized")
    stored = [spec.suffix for spec in specs if spec.optional and spec.name.startswith("input_")]
    return Capability(True, f"as {', '.join(keys)} says{'; stored: ' * bool(stored)}{', '.join(stored)}")


def _experts(weight_type: type[Weight], layouts: Sequence[str]) -> Capability:
    specs = weight_type.tensors(weight_type.example)
    if _of_all_experts(specs):
        names = {FIELDS[spec.suffix] for spec in specs}
        own = next(t.format for t in FORMATS if names == {s.suffix for s in _required(t)})
        where = (
            f"qload/experts/stacked_storage.py shows each of its experts as a layer of {own}, loaded instead"
        )
        return Capability(False, f"it is a stack itself; {where}")
    module = "multiplied by qload/kernels/experts.py"
    to = f"repacked to {', '.join(layouts)}" if layouts else "not repacked by qload/kernel_formats/repack.py"
    why = "" if layouts else f", as {_why_no_layout(weight_type)}"
    return Capability(True, f"from experts.0.gate_proj.{specs[0].suffix} and so on; {module}; {to}{why}")


def _stacks(weight_type: type[Weight], specs: Sequence[TensorSpec]) -> Capability:
    """Names of stacks of this format, found by a search in stacks of one expert without data."""
    if _of_all_experts(specs):
        return Capability(True, f"from {STACK}{' with '.join(spec.suffix for spec in specs)}, as one weight")
    tensors, endings = _required(weight_type), defaultdict[str, list[str]](list)
    for ending, field in stack_endings().items():
        endings[field].append(ending)
    unknown = [spec.suffix for spec in tensors if not endings.keys() & {*spec.suffixes}]
    if unknown:
        where = "qload/experts/declared_stacks.py has no stack of"
        return Capability(False, f"{where} {', '.join(unknown)}")
    ways = product(*([e for s in spec.suffixes for e in endings.get(s, ())] for spec in tensors))
    stacks = [way for way in ways if _is_found(dict(zip(way, tensors, strict=True)))]
    first, *others = (" or ".join(dict.fromkeys(each)) for each in zip(*stacks, strict=True))
    return Capability(True, f"from {STACK}{first}{' with ' * bool(others)}{' and '.join(others)}")


def _is_found(stored: Mapping[str, TensorSpec]) -> bool:
    """Return whether the search finds the stacks of these tensors, given by the endings of their names."""
    tensors = {}
    for ending, spec in stored.items():
        shape = [axis.size(axis.logical(LARGE) or 1) or 1 for axis in spec.axes]
        blocks = [*shape[:-1], shape[-1] // BYTES_OF_BLOCK, BYTES_OF_BLOCK] if ending in BLOCKS else shape
        tensors[LEAD + STACK + ending] = torch.empty(1, *blocks, dtype=TORCH[spec.dtypes[0]], device="meta")
    stacks = find_stacks(MemoryStorage(tensors), {"model_type": "qwen3_moe", **SIZES})
    shown = {name for stack in stacks for name, _, _ in stack.names()}
    own = LEAD + STACK.replace("experts.", "experts.0.")
    fields = stack_endings()
    return shown == {f"{own}.{fields[ending]}" for ending in stored}


def _of_all_experts(specs: Sequence[TensorSpec]) -> bool:
    return any(axis.dim == "E" for spec in specs for axis in spec.axes)


def _required(weight_type: type[Weight]) -> list[TensorSpec]:
    return [spec for spec in weight_type.tensors(weight_type.example) if not spec.optional]


def _checked_tensors(specs: Sequence[TensorSpec]) -> str:
    """Tensors with checked values: the subject of the value rules."""
    return ", ".join(
        spec.suffix
        for spec in specs
        if spec.role is not Role.WORD
        or spec.dtypes[0].is_floating_point
        or spec.nibbles
        or spec.between
        or spec.fact
    )


def _config_text(config: Config) -> str:
    """Format a config by its values other than defaults."""
    own = {field.name: field.default for field in fields(config)}
    values = {name: value for name, default in own.items() if (value := getattr(config, name)) != default}
    return f"{type(config).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


def _why_no_layout(weight_type: type[Weight]) -> str:
    return "a plain weight has no codes" if weight_type.plain else "no kernel format holds it"
