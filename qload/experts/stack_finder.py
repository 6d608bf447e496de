"""Find stacks, tensors with one matrix of every expert of a layer, and locate each expert in them.

A stack is identified by its own tensors: a weight with one more axis than a layer has in its format, of
length E, and its scales. `PREFIX` is the name of a matrix, such as `experts.gate_up_proj` or `moe.down_proj`;
its fields are `PREFIX_field` or `PREFIX.field`, in the forms of `stack_layouts`.

Evidence for the axis of outputs, in order of precedence: the scales, the sizes of the config, the other
matrices of the module, the type of model. Joined gate and up are split if their order is known; else they
stay one layer of 2 N outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from qload import dtypes
from qload.architecture import Architecture, architecture_of
from qload.experts.declared_stacks import WEIGHT_DTYPES, codes_fields, is_weight, stored_codes
from qload.experts.stack_config import read_block_size, read_hidden_size
from qload.experts.stack_layouts import (
    BLOCKS,
    DOWN,
    FIELDS,
    HALVES,
    LAYERS,
    SCALES,
    WEIGHTS,
    Layout,
    Slot,
    StackOrder,
    StackOrders,
)
from qload.formats.unquantized import FLOATS
from qload.spec import named
from qload.storage import TensorInfo, WeightStorage

MAX_EXPERTS = 1 << 12  # per layer; published models have some hundreds
MAX_NAMES = 1 << 20  # tensors of all experts, about as many as the longest header lists
DEFAULT_BLOCK = (128, 128)  # (outputs, inputs) of FP8 blocks if the config states none

ENDINGS = {
    f"{matrix}{ending}": (matrix, ending) for matrix in LAYERS for ending in FIELDS if ending[:1] != "."
}
DOTTED = {ending[1:]: ending for ending in FIELDS if ending[:1] == "."}
IDENTIFYING_FIELDS = frozenset((*WEIGHTS, "weight_scale", "weight_scale_inv", "blocks"))
EXPERT_MODULES = {"switch_mlp": "experts"}  # MLX's name of a module -> transformers'
FAMILIES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}  # other names of experts' layers
BYTE_DTYPES = (dtypes.uint8, dtypes.int8)  # dtypes of codes that need a scale
E8M0_DTYPES = (dtypes.uint8, dtypes.float8_e8m0fnu)  # dtypes of E8M0 scales
GROUPS_FP4, GROUP_MX = (16, 32), 32  # inputs that share a scale


@dataclass(frozen=True)
class StoredStack:
    """One stored tensor of several experts, and the slot of each expert's tensors in it.

    Attributes
    ----------
    lead, matrix
        The module of the experts, and the matrix in it: `model.layers.0.mlp.experts`, `gate_up_proj`.
    source
        The name of the stored tensor.
    count
        Number of experts.
    parts
        `gate_proj.weight` -> its slot.
    field
        Field of each expert's layer, such as `weight_scale`.
    """

    lead: str
    matrix: str
    source: str
    count: int
    parts: Mapping[str, Slot]
    field: str

    def names(self) -> Iterator[tuple[str, Slot, int]]:
        """Yield each expert's tensors: name, slot, number of the expert."""
        for expert in range(self.count):
            for part, slot in self.parts.items():
                yield f"{self.lead}.{expert}.{part}", slot, expert

    @property
    def prefix(self) -> str:
        """Name of the matrix of all experts."""
        return f"{self.lead}.{self.matrix}"

    @property
    def is_weight(self) -> bool:
        """True for a stack of weights or codes, and False for one beside them."""
        return is_weight(self.field)

    @property
    def joined(self) -> bool:
        """True if gate and up of an expert stay one layer."""
        return self.layers != LAYERS.get(self.matrix, self.layers) and len(self.layers) == 1

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers of an expert in this tensor: `gate_proj`, `up_proj`."""
        return tuple(part.removesuffix(f".{self.field}") for part in self.parts)


@dataclass(frozen=True)
class FoundStacks:
    """The stacks of a checkpoint.

    `stacks`: the readable ones, one for each tensor. `unread`: tensor name -> the reason for each other one.
    """

    stacks: list[StoredStack]
    unread: dict[str, str]


@dataclass(frozen=True)
class StackedMatrix:
    """The stored tensors of one matrix of all experts, by field; `endings`: the suffixes of their names.

    `codes`: the field of codes of a declared stack; "" for a layout of `stack_layouts`.
    """

    lead: str
    name: str
    tensors: Mapping[str, str]
    endings: Mapping[str, str]
    infos: Mapping[str, TensorInfo]
    codes: str

    @property
    def prefix(self) -> str:
        """`experts.gate_up_proj`."""
        return f"{self.lead}.{self.name}"

    @cached_property
    def weight(self) -> str | None:
        """The field of codes or floats; None if only scales are stacked."""
        return self.codes or next((name for name in WEIGHTS if name in self.tensors), None)

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers of an expert in this matrix."""
        return LAYERS.get(self.name, (self.name,))

    @cached_property
    def info(self) -> TensorInfo:
        """Header of the weight."""
        assert self.weight is not None
        return self.infos[self.weight]

    @property
    def plain(self) -> bool:
        """True for floats without scales."""
        return self.info.stored_dtype in FLOATS and self.tensors.keys() <= {"weight", "bias"}

    @property
    def in_blocks(self) -> bool:
        """True for MXFP4 as gpt-oss stores it."""
        return self.weight is not None and self.endings[self.weight] in BLOCKS

    @cached_property
    def packs_inputs(self) -> bool:
        """True if a byte holds two inputs: uint8, or int8 beside exponents, as in DeepSeek V4."""
        scale = self.infos.get("scale")
        pairs = (
            scale is not None and scale.stored_dtype in E8M0_DTYPES and self.info.stored_dtype == dtypes.int8
        )
        return self.info.stored_dtype == dtypes.uint8 or pairs

    @cached_property
    def packs_outputs(self) -> bool:
        """True if a byte holds two outputs, as in ModelOpt's AWQ with a scale for each group of inputs."""
        scale = self.infos.get("weight_scale")
        if self.info.stored_dtype != dtypes.uint8 or "weight_scale_2" in self.infos or scale is None:
            return False
        rows, columns = self.info.shape[1:3]
        n, k = scale.shape[1:] if len(scale.shape) == 3 else (0, 1)
        return scale.stored_dtype in FLOATS and n == 2 * rows and not columns % max(k, 1)


def find_stacks(storage: WeightStorage, config: Mapping[str, Any]) -> list[StoredStack]:
    """Find the readable stacks; `config`: the model's config.json, which is not trusted."""
    return search(storage, config).stacks


def search(
    storage: WeightStorage, config: Mapping[str, Any], orders: StackOrders | None = None
) -> FoundStacks:
    """Find the stacks of a checkpoint from its headers, with a reason for each unreadable one.

    `orders`: orders of stacks that are known to a caller, before what names and shapes say.

    A stack is unreadable with more experts than the config states or than MAX_EXPERTS, beyond MAX_NAMES
    tensors in all, or with ambiguous axes.
    """
    result = FoundStacks([], {})
    modules = _modules(storage)
    if not modules:
        return result
    finder = _Finder(storage, config, architecture_of(config), orders)
    total, unread = 0, dict[str, str]()
    for matrices in modules.values():
        for matrix, stacks in finder.of_module(matrices):
            total += 0 if isinstance(stacks, str) else sum(stack.count * len(stack.parts) for stack in stacks)
            if not isinstance(stacks, str) and total <= MAX_NAMES:
                result.stacks.extend(stacks)
            elif matrix.weight is None or not matrix.plain:
                why = (
                    stacks if isinstance(stacks, str) else f"more than {MAX_NAMES} tensors of experts in all"
                )
                result.unread.update(dict.fromkeys(matrix.tensors.values(), why))
                unread[matrix.prefix] = why
    result.unread.update(_under(storage, unread, result.stacks))
    return result


def _under(
    storage: WeightStorage, unread: Mapping[str, str], stacks: Iterable[StoredStack]
) -> Iterator[tuple[str, str]]:
    """Yield the other tensors of unread matrices, by the prefixes of their names, with the reason."""
    read = {stack.source for stack in stacks} if unread else frozenset()
    for prefix, reason in unread.items():
        stored = storage.keys()
        for name in stored:
            if name.startswith((f"{prefix}_", f"{prefix}.")) and name not in read:
                yield name, reason


def _modules(storage: WeightStorage) -> dict[str, list[StackedMatrix]]:
    """Collect candidates for stacks by module, from names and numbers of axes."""
    stored = storage.keys()
    groups: dict[tuple[str, str], dict[str, str]] = {}  # (module, matrix) -> ending -> name
    for name in stored:
        lead, _, last = name.rpartition(".")
        if last in ENDINGS:
            matrix, ending = ENDINGS[last]
            groups.setdefault((lead, matrix), {})[ending] = name
        elif last in IDENTIFYING_FIELDS:
            module, _, matrix = lead.rpartition(".")
            axes = 0 if module[-1:].isdigit() else len(storage.info(name).shape)
            if axes == (4 if last == "blocks" else 3) and _may_be_stacked(
                storage, name, module, matrix, last
            ):
                groups.setdefault((module, matrix), {})[DOTTED[last]] = name
    modules: dict[str, list[StackedMatrix]] = {}
    for (module, matrix), codes in stored_codes(storage, stored).items():
        others = groups.pop((module, matrix), ())
        if codes in WEIGHTS or not any(FIELDS[ending] in WEIGHTS for ending in others):
            modules.setdefault(module, []).append(_declared_matrix(storage, module, matrix, codes))
    for (module, matrix), endings in groups.items():
        for last, ending in DOTTED.items():
            name = f"{module}.{matrix}.{last}"
            if name in stored:
                endings.setdefault(ending, name)
        found = _matrix(storage, module, matrix, endings)
        if found is not None:
            modules.setdefault(module, []).append(found)
    return modules


def _may_be_stacked(storage: WeightStorage, name: str, module: str, matrix: str, last: str) -> bool:
    """Return whether a tensor of three axes may be of a stack: a weight, or scales of numbered experts."""
    if last in WEIGHTS:
        return matrix in LAYERS or (storage.info(name).stored_dtype not in FLOATS and "conv" not in matrix)
    return matrix in LAYERS and module.endswith(("experts", "moe"))


def _matrix(
    storage: WeightStorage, module: str, name: str, stored: Mapping[str, str]
) -> StackedMatrix | None:
    """Group a matrix's tensors by field; None if it is no stack: a weight with two axes, or a lone bias."""
    tensors: dict[str, str] = {}
    endings: dict[str, str] = {}
    if not module:
        return None
    for ending, tensor in stored.items():
        field_name = FIELDS[ending]
        if ending == "_scales" and not {"_qweight", ".qweight"}.isdisjoint(stored):
            field_name = "scales"
        elif ending == ".scales" and ".blocks" in stored:
            field_name = "weight_scale"
        if field_name not in tensors:
            tensors[field_name], endings[field_name] = tensor, ending
    infos = {field_name: storage.info(tensor) for field_name, tensor in tensors.items()}
    matrix = StackedMatrix(module, name, tensors, endings, infos, "")
    if matrix.weight is None:
        scales = any("scale" in field_name for field_name in tensors)
        return matrix if scales and module.endswith(("experts", "moe")) else None
    axes = 4 if matrix.in_blocks else 3
    return matrix if len(matrix.info.shape) >= axes else None


def _declared_matrix(storage: WeightStorage, module: str, name: str, codes: str) -> StackedMatrix:
    """Group a matrix's declared tensors by field."""
    stored, tensors, endings = storage.keys(), dict[str, str](), dict[str, str]()
    for ending, field_name in codes_fields()[codes].endings().items():
        if f"{module}.{name}{ending}" in stored:
            tensors[field_name], endings[field_name] = f"{module}.{name}{ending}", ending
    infos = {field_name: storage.info(tensor) for field_name, tensor in tensors.items()}
    return StackedMatrix(module, name, tensors, endings, infos, codes)


@dataclass(frozen=True)
class _AxisOrder:
    """Order of axes deduced from shapes; `sure`: no other order fits."""

    inputs_first: bool
    sure: bool


@dataclass(frozen=True)
class _Finder:
    storage: WeightStorage
    config: Mapping[str, Any]
    architecture: Architecture | None
    orders: StackOrders | None

    @cached_property
    def block(self) -> tuple[int, int] | None:
        return read_block_size(self.config)

    @cached_property
    def hidden(self) -> int | None:
        return read_hidden_size(self.config)

    @cached_property
    def scales_have_inputs(self) -> bool:
        section = self.config.get("quantization_config")
        return isinstance(section, dict) and section.get("quant_method") == "compressed-tensors"

    @cached_property
    def max_experts(self) -> int:
        """Largest number of experts of a layer."""
        stated = self.architecture.sizes.get("experts") if self.architecture else None
        return MAX_EXPERTS if stated is None else min(stated, MAX_EXPERTS)

    def of_module(
        self, matrices: list[StackedMatrix]
    ) -> Iterator[tuple[StackedMatrix, list[StoredStack] | str]]:
        """Yield each matrix with its stacks, or with the reason why it is unreadable."""
        weights = [matrix for matrix in matrices if matrix.weight is not None and not matrix.codes]
        orders = self._axes(weights)
        for matrix in matrices:
            if matrix.weight is None:
                yield matrix, self._scales_alone(matrix)
            elif matrix.codes:
                yield matrix, self._declared_stacks(matrix)
            else:
                yield matrix, self._stacks(matrix, orders.get(matrix.name))

    def _stated(self, matrix: StackedMatrix) -> StackOrder | None:
        """Order of a matrix by the caller."""
        return None if self.orders is None else self.orders(matrix.tensors[matrix.weight or ""])

    def _known(self, matrix: StackedMatrix) -> bool:
        """Return whether the model type's table has experts in this module."""
        place = self.architecture.find(f"{matrix.lead}.0.gate_proj") if self.architecture else None
        return place is not None and place.expert is not None

    def _stacks(self, matrix: StackedMatrix, inputs_first: bool | None) -> list[StoredStack] | str:
        """Stacks of a matrix with a weight, or the reason why it is unreadable."""
        name, info = matrix.tensors[matrix.weight or ""], matrix.info
        what = f"experts in one tensor, {name} of shape {list(info.shape)}"
        if not 1 <= info.shape[0] <= self.max_experts:
            return f"{what}: 1 to {self.max_experts} experts are expected"
        if info.stored_dtype not in (
            WEIGHT_DTYPES[matrix.weight or ""] if not matrix.in_blocks else (dtypes.uint8,)
        ):
            return f"{what}: no format has {matrix.weight} of {str(info.stored_dtype).removeprefix('torch.')}"
        scale = matrix.infos.get("weight_scale")
        if matrix.in_blocks and scale is not None and scale.stored_dtype not in E8M0_DTYPES:
            return f"{what}: MXFP4 needs scales of uint8 or float8_e8m0fnu"
        if len(info.shape) != (4 if matrix.in_blocks else 3):
            return f"{what}: {4 if matrix.in_blocks else 3} axes are expected"
        if matrix.plain and not self._known(matrix):
            return ""  # a tensor like any other
        scaled = matrix.in_blocks or any("scale" in field_name for field_name in self._beside(matrix))
        if info.stored_dtype in BYTE_DTYPES and not scaled:
            return f"{what}: no scale with a known name is stored beside it"
        if inputs_first is None:
            scales = [
                f"{field_name} of shape {list(info.shape)}"
                for field_name, info in self._beside(matrix).items()
                if field_name in SCALES
            ]
            beside = f" ({', '.join(scales)})" if scales else ""
            return f"{what}: neither scales{beside} nor config show the order of outputs and inputs"
        order = self._order(matrix, inputs_first)
        if matrix.in_blocks and order is None:
            return []  # the format `mxfp4_experts` reads it
        if matrix.plain and (order is None or self._turned(matrix, inputs_first)):
            return ""  # a tensor like any other, in no order that its type of model has
        reason = ""
        for joined in (False, True):
            if (order is None and not joined) or (matrix.plain and joined):
                continue
            layout = self._layout(matrix, inputs_first, joined, interleaved=order == "turns")
            stacks = self._laid_out(matrix, layout)
            if not isinstance(stacks, str):
                return stacks
            reason = stacks
        return reason

    def _declared_stacks(self, matrix: StackedMatrix) -> list[StoredStack] | str:
        """Stacks of declared tensors, or the reason why they are unreadable; gate and up stay joined."""
        count = matrix.info.shape[0]
        (layer,) = matrix.layers if len(matrix.layers) == 1 else (matrix.name,)
        above, _, module = matrix.lead.rpartition(".")
        lead = named(above, EXPERT_MODULES.get(module, module))
        stacks = []
        for field_name, source in matrix.tensors.items():
            info = matrix.infos[field_name]
            what = f"experts in one tensor, {source} of shape {list(info.shape)}"
            if not 1 <= count <= self.max_experts:
                return f"{what}: 1 to {self.max_experts} experts are expected"
            if info.shape[:1] != (count,):
                return (
                    f"{what}: the first axis is not of the {count} experts of {matrix.tensors[matrix.codes]}"
                )
            slot = Slot(source, TensorInfo(info.stored_dtype, info.shape[1:], info.file))
            places = {f"{layer}.{field_name}": slot}
            stacks.append(StoredStack(lead, matrix.name, source, count, places, field_name))
        return stacks

    def _beside(self, matrix: StackedMatrix) -> Mapping[str, TensorInfo]:
        """Headers of the stack's fields; of a lone stacked weight, those of the first expert's own scales."""
        if len(matrix.infos) > 1:
            return matrix.infos
        fields, start, stored = {}, f"{matrix.lead}.0.{matrix.layers[0]}.", self.storage.keys()
        for field_name in SCALES:
            if f"{start}{field_name}" in stored:
                info = self.storage.info(f"{start}{field_name}")
                fields[field_name] = TensorInfo(info.stored_dtype, (1, *info.shape), info.file, info.shared)
        return fields

    def _order(self, matrix: StackedMatrix, inputs_first: bool) -> str | None:
        """Order of gate and up in one tensor: "halves" or "turns" (interleaved); None if unknown."""
        if len(matrix.layers) == 1:
            return None if matrix.in_blocks and not self._known(matrix) else "halves"
        stated = self._stated(matrix)
        if stated is not None:
            return "turns" if stated.interleaved else "halves"
        if matrix.name in HALVES:
            return "halves"
        if self._known(matrix):
            assert self.architecture is not None
            stacked = self.architecture.table.stacked
            if not stacked.interleaved:
                return "halves"
            return "turns" if matrix.in_blocks or stacked.inputs_first == inputs_first else None
        return "halves" if self._joined_blocks(matrix, inputs_first) else None

    def _turned(self, matrix: StackedMatrix, inputs_first: bool) -> bool:
        """Return whether the axes contradict the table of a type with interleaved gate and up."""
        assert self.architecture is not None
        stacked = self.architecture.table.stacked
        return stacked.interleaved and stacked.inputs_first != inputs_first

    def _joined_blocks(self, matrix: StackedMatrix, inputs_first: bool) -> bool:
        """Return whether the number of scale blocks fits gate and up apart, and not both together."""
        block, count = self.block or DEFAULT_BLOCK, len(matrix.layers)
        N, _ = _sizes(matrix, inputs_first)
        rows = count * -(-(N // count) // block[0])
        for field_name in SCALES:
            dims = matrix.infos[field_name].shape[1:] if field_name in matrix.infos else ()
            if len(dims) == 2 and dims[1 if inputs_first else 0] == rows != -(-N // block[0]):
                return N % count == 0
        return False

    def _layout(
        self, matrix: StackedMatrix, inputs_first: bool, joined: bool, *, interleaved: bool
    ) -> Layout:
        layers = (matrix.name,) if joined and len(matrix.layers) > 1 else matrix.layers
        N, K = _sizes(matrix, inputs_first)
        quantized = matrix.info.stored_dtype not in FLOATS
        return Layout(
            layers,
            len(matrix.layers),
            N,
            K,
            inputs_first,
            interleaved and len(layers) > 1,
            matrix.info.shape[0],
            self.block,
            quantized,
            self.scales_have_inputs and matrix.info.stored_dtype in (dtypes.int8, dtypes.int32),
            matrix.packs_inputs,
        )

    def _laid_out(self, matrix: StackedMatrix, layout: Layout) -> list[StoredStack] | str:
        """Locate all tensors of a matrix, or give the reason why one of them is unreadable."""
        stacks = []
        for field_name, source in matrix.tensors.items():
            info, ending = matrix.infos[field_name], matrix.endings[field_name]
            slots = layout.slots(field_name, ending, source, info)
            if slots is None:
                return (
                    f"experts in one tensor, {source} of shape {list(info.shape)}: no known layout of "
                    f"{field_name} for E experts of {layout.N} outputs and {layout.K} inputs"
                )
            stacked = info.shape[0] if slots[0].counted else layout.experts
            if stacked > self.max_experts:
                return f"{source} of shape {list(info.shape)}: 1 to {self.max_experts} experts are expected"
            names = (f"{layer}.{field_name}" for layer in layout.layers)
            places = dict(zip(names, slots, strict=True))
            stacks.append(StoredStack(matrix.lead, matrix.name, source, stacked, places, field_name))
        return stacks

    def _scales_alone(self, matrix: StackedMatrix) -> list[StoredStack] | str:
        """Locate stacked scales of weights that are stored expert by expert."""
        first = next(iter(matrix.tensors))
        shape = list(matrix.infos[first].shape)
        what = f"scales of experts in one tensor, {matrix.tensors[first]} of shape {shape}"
        count = max((info.shape[0] for info in matrix.infos.values() if info.shape), default=0)
        if not 1 <= count <= self.max_experts:
            return f"{what}: 1 to {self.max_experts} experts are expected"
        stored = self.storage.keys()
        for layers in (matrix.layers, FAMILIES.get(matrix.name, ())):
            names = (
                f"{matrix.lead}.{e}.{layer}.{field_name}"
                for e in range(count)
                for layer in layers
                for field_name in WEIGHTS
            )
            weight = next((self.storage.info(name) for name in names if name in stored), None)
            if weight is not None and len(weight.shape) == 2:
                N, K = weight.shape[0], weight.shape[1] * (2 if weight.stored_dtype == dtypes.uint8 else 1)
                layout = Layout(
                    layers,
                    len(layers),
                    N * len(layers),
                    K,
                    inputs_first=False,
                    interleaved=False,
                    experts=count,
                    block=self.block,
                    quantized=weight.stored_dtype not in FLOATS,
                    scales_have_inputs=False,
                    four_bits=False,
                )
                return self._laid_out(matrix, layout)
        return []  # the weights are missing, and rules report that

    # Order of the axes of inputs and outputs

    def _axes(self, matrices: list[StackedMatrix]) -> dict[str, bool]:
        """Map matrices to whether inputs come first; without an entry for an ambiguous one."""
        orders: dict[str, bool] = {}
        weak: dict[str, bool] = {}
        for matrix in matrices:
            by_scales = self._by_scales(matrix)
            sizes = self._by_sizes(matrix)
            stated = self._stated(matrix)
            if sizes is None and stated is not None:
                sizes = stated.inputs_first
            if by_scales is not None and by_scales.sure:
                orders[matrix.name] = by_scales.inputs_first
            elif sizes is not None:
                orders[matrix.name] = sizes
            elif by_scales is not None:
                weak[matrix.name] = by_scales.inputs_first
        shared = {*orders.values()}
        if not shared:
            pair = _by_pair({matrix.name: matrix for matrix in matrices})
            shared = set() if pair is None else {pair}
        if not shared and self.architecture is not None and any(map(self._known, matrices)):
            shared = {self.architecture.table.stacked.inputs_first}
        weakly = {*weak.values()}
        for matrix in matrices:
            if len(shared) == 1:
                orders.setdefault(matrix.name, next(iter(shared)))
            elif matrix.name in weak:
                orders.setdefault(matrix.name, weak[matrix.name])
            elif not shared and len(weakly) == 1:
                orders.setdefault(matrix.name, next(iter(weakly)))
        return orders

    def _by_scales(self, matrix: StackedMatrix) -> _AxisOrder | None:
        """Deduce the order of axes from the shapes of a weight and its scales."""
        if matrix.in_blocks or matrix.info.stored_dtype == dtypes.int32 or matrix.packs_outputs:
            return _AxisOrder(inputs_first=False, sure=True)
        if len(matrix.info.shape) != 3:
            return None
        for field_name, info in self._beside(matrix).items():
            if field_name in SCALES:
                order = self._by_scale(matrix, info)
                if order is not None:
                    return order
        return None

    def _by_scale(self, matrix: StackedMatrix, scale: TensorInfo) -> _AxisOrder | None:
        """Deduce the order of axes from one scale, in the order of its weight.

        Scales of outputs and of four-bit floats may be in the other order: their group sizes are fixed.
        """
        first, second = matrix.info.shape[1:]
        dims = scale.shape[1:]
        if len(dims) == 1:
            outputs, inputs = dims[0] == first, dims[0] == second
            return _AxisOrder(inputs, True) if outputs != inputs and dims[0] > len(matrix.layers) else None
        if len(dims) != 2 or prod(dims) == 1:
            return None
        same_order = {turned: self._fits(matrix, scale, turned, turned) for turned in (False, True)}
        exact = 1 in dims or matrix.packs_inputs
        other_order = {
            turned: exact and self._fits(matrix, scale, turned, not turned) for turned in (False, True)
        }
        if same_order[False] != same_order[True]:
            return _AxisOrder(same_order[True], sure=not (1 in dims and other_order[same_order[False]]))
        if not same_order[False] and other_order[False] != other_order[True]:
            return _AxisOrder(other_order[True], True)
        return None

    def _fits(self, matrix: StackedMatrix, scale: TensorInfo, inputs_first: bool, scale_turned: bool) -> bool:
        """Return whether a scale fits the outputs, groups or blocks of a weight in these orders of axes."""
        N, K = _sizes(matrix, inputs_first)
        n, k = scale.shape[:0:-1] if scale_turned else scale.shape[1:]
        if matrix.packs_inputs:
            return n == N and any(k * group == K for group in GROUPS_FP4)
        if scale.stored_dtype == dtypes.uint8:
            return n == N and k * GROUP_MX == K
        if n == N and (k == 1 or (k < K and -(-K // -(-K // k)) == k)):
            return True
        rows, columns = self.block or DEFAULT_BLOCK
        count = len(matrix.layers)
        return k == -(-K // columns) and n in (-(-N // rows), count * -(-(N // count) // rows))

    def _by_sizes(self, matrix: StackedMatrix) -> bool | None:
        """Deduce whether inputs come first from sizes: the model type's table, or the hidden size."""
        if len(matrix.info.shape) != 3 or matrix.info.stored_dtype == dtypes.int32:
            return None
        both = {turned: _sizes(matrix, turned) for turned in (False, True)}
        if self.architecture is not None and self._known(matrix):
            sizes = [self.architecture.expected(f"{matrix.lead}.0.{layer}") for layer in matrix.layers]
            known = [size for size in sizes if size is not None]
            expected = (sum(N for N, _ in known), known[0][1]) if len(known) == len(sizes) else None
            fits = {turned: size == expected for turned, size in both.items()}
        elif self.hidden is not None and matrix.name in LAYERS:
            axis = 0 if matrix.name in DOWN else 1
            fits = {turned: size[axis] == self.hidden for turned, size in both.items()}
        else:
            return None
        return fits[True] if fits[False] != fits[True] else None


def _by_pair(matrices: Mapping[str, StackedMatrix]) -> bool | None:
    """Deduce whether inputs come first: down has half as many inputs as gate_up has outputs."""
    gate_up = next((matrix for name, matrix in matrices.items() if len(matrix.layers) > 1), None)
    down = next((matrix for name, matrix in matrices.items() if name in DOWN), None)
    if gate_up is None or down is None or {len(gate_up.info.shape), len(down.info.shape)} != {3}:
        return None
    fits = {}
    for turned in (False, True):
        (N, K), (outputs, inputs) = _sizes(gate_up, turned), _sizes(down, turned)
        fits[turned] = (2 * inputs, outputs) == (N, K)
    return fits[True] if fits[False] != fits[True] else None


def _sizes(matrix: StackedMatrix, inputs_first: bool) -> tuple[int, int]:
    """(N, K) of a stacked weight in an order of axes."""
    dims = matrix.info.shape[1:]
    if matrix.in_blocks:
        return dims[0], prod(dims[1:]) * 2
    if matrix.packs_outputs:
        return dims[0] * 2, dims[1]
    N, K = (dims[1], dims[0]) if inputs_first else (dims[0], dims[1])
    return N, K * 2 if matrix.packs_inputs else K
