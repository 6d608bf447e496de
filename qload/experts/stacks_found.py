"""Which tensors of a checkpoint are stacks of experts, and what each of them holds, by names and headers.

The type of model says how its experts lie, and its sizes check that. Of a type that is not known only the
scales are joined that transformers keeps together beside weights that it stores for each expert: those it
has cut into gate and up itself.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from qload.architecture import Architecture, architecture_of
from qload.architecture.table import Stacked
from qload.experts.stacks_forms import FIELDS, MATRICES, SCALES_OF_FP8, Matrix
from qload.experts.stacks_slots import Slot
from qload.formats.fp8 import WEIGHTS as FP8
from qload.formats.unquantized import FLOATS
from qload.storage import TensorInfo, WeightStorage

MOST_EXPERTS = 1 << 12  # of a layer; published models have some hundreds
MOST_NAMES = 1 << 20  # of all experts' tensors: as many as a header of the greatest length lists
WEIGHTS = ("", "_blocks")
READ = (*FLOATS, *FP8, torch.uint8)
NVFP4 = "_weight_scale_2"  # which tells two inputs to a byte from two outputs
FAMILIES = (MATRICES, {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)})
LASTS = {f"{matrix}{suffix}": (matrix, suffix) for matrix in MATRICES for suffix in FIELDS}

Group = Mapping[str, Mapping[str, str]]  # matrix -> suffix -> the tensor's whole name


@dataclass(frozen=True, slots=True)
class StoredStack:
    """One stored tensor of several experts: its name, and where each part's tensor of an expert lies.

    `parts`: `gate_proj.weight` -> its place. `count`: how many experts there are.
    """

    lead: str
    source: str
    count: int
    parts: Mapping[str, Slot]

    def names(self) -> Iterator[tuple[str, Slot, int]]:
        """Each expert's tensors: name, place, number of the expert."""
        for expert in range(self.count):
            for part, slot in self.parts.items():
                yield f"{self.lead}.{expert}.{part}", slot, expert


def find_stacks(storage: WeightStorage, config: Mapping[str, Any]) -> list[StoredStack]:
    """The stacks that can be read expert by expert; `config`: the model's config.json, hostile as it may be.

    Left out are those of more experts than the config says, or than MOST_EXPERTS; and all beyond MOST_NAMES.
    """
    stored = storage.keys()
    groups = _groups(stored)
    if not groups:
        return []
    finder = _Finder(storage, stored, architecture_of(config), _block(config))
    found: list[StoredStack] = []
    total = 0
    for lead, group in groups.items():
        for stacks in finder.of(lead, group):
            total += sum(stack.count * len(stack.parts) for stack in stacks)
            if total > MOST_NAMES:
                return found
            found += stacks
    return found


def _groups(names: Collection[str]) -> dict[str, dict[str, dict[str, str]]]:
    """The names that stacks have, by the module, the matrix and the suffix."""
    groups: dict[str, dict[str, dict[str, str]]] = {}
    for name in names:
        lead, _, last = name.rpartition(".")
        if last in LASTS and lead.endswith("experts"):
            matrix, suffix = LASTS[last]
            groups.setdefault(lead, {}).setdefault(matrix, {})[suffix] = name
    return groups


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The (outputs, inputs) of FP8 blocks, as the config has them; None where it has none that can be."""
    section = config.get("quantization_config")
    size = section.get("weight_block_size") if isinstance(section, dict) else None
    if not isinstance(size, list) or len(size) != 2 or not all(type(one) is int and one > 0 for one in size):
        return None
    return size[0], size[1]


@dataclass(frozen=True)
class _Finder:
    storage: WeightStorage
    stored: Collection[str]
    architecture: Architecture | None
    block: tuple[int, int] | None

    def of(self, lead: str, group: Group) -> Iterator[list[StoredStack]]:
        """The stacks of each matrix of a module, of which all that belongs to it can be read, or nothing."""
        order = self._order(lead, group)
        for name, tensors in group.items():
            weight = next((tensors[suffix] for suffix in WEIGHTS if suffix in tensors), None)
            if weight is None:
                yield self._beside(lead, name, tensors)
            elif order is not None:
                yield self._stacks(lead, name, tensors, order, self.storage.info(weight))

    def _stacks(
        self, lead: str, name: str, tensors: Mapping[str, str], order: Stacked, weight: TensorInfo
    ) -> list[StoredStack]:
        if len(weight.shape) < 3 or not 1 <= weight.shape[0] <= self._most or weight.dtype not in READ:
            return []
        if "_blocks" in tensors:
            order = replace(order, inputs_first=False)
        elif weight.dtype == torch.uint8 and NVFP4 not in tensors:
            return []
        parts = MATRICES[name]
        matrix = Matrix(parts, *_sizes(weight, order), order, self.block, weight.dtype in FP8)
        return self._all(lead, matrix, parts, tensors, weight.shape[0])

    def _beside(self, lead: str, name: str, tensors: Mapping[str, str]) -> list[StoredStack]:
        """Scales that are stored together, of weights that are not."""
        own = {suffix: tensor for suffix, tensor in tensors.items() if suffix in SCALES_OF_FP8}
        count = max((self.storage.info(tensor).shape[:1] for tensor in own.values()), default=())
        if not count or not 1 <= count[0] <= self._most:
            return []
        for family in FAMILIES:
            parts = family.get(name, ())
            weights = (f"{lead}.{expert}.{part}.weight" for expert in range(count[0]) for part in parts)
            first = next((weight for weight in weights if weight in self.stored), None)
            info = None if first is None else self.storage.info(first)
            if info is not None and len(info.shape) == 2:
                N, K = info.shape
                matrix = Matrix(parts, N * len(parts), K, Stacked(), self.block, info.dtype in FP8)
                return self._all(lead, matrix, parts, own, count[0])
        return []

    def _all(
        self, lead: str, matrix: Matrix, parts: tuple[str, ...], tensors: Mapping[str, str], count: int
    ) -> list[StoredStack]:
        """All tensors of a matrix, or none where one is in a form that is not known."""
        found = []
        for suffix, source in tensors.items():
            info = self.storage.info(source)
            slots = matrix.slots(suffix, source, info)
            if slots is None:
                return []
            own = info.shape[0] if slots[0].counted else count
            if own > self._most:
                return []
            names = (f"{part}.{FIELDS[suffix]}" for part in parts)
            found.append(StoredStack(lead, source, own, dict(zip(names, slots, strict=True))))
        return found

    def _order(self, lead: str, group: Group) -> Stacked | None:
        """How the matrices of a module lie: as the type of model has it, unless their sizes say otherwise."""
        place = self.architecture.find(f"{lead}.0.gate_proj") if self.architecture else None
        if self.architecture is None or place is None or place.expert is None:
            return None
        own = self.architecture.table.stacked
        other = replace(own, inputs_first=not own.inputs_first)
        if self._fits(lead, group, own) or not self._fits(lead, group, other):
            return own
        return None if own.interleaved else other

    def _fits(self, lead: str, group: Group, order: Stacked) -> bool:
        """Whether all stacked weights of a module have the config's sizes, if they lie so."""
        assert self.architecture is not None
        for name, tensors in group.items():
            info = self.storage.info(tensors[""]) if "" in tensors else None
            expected = [self.architecture.expected(f"{lead}.0.{part}") for part in MATRICES[name]]
            if info is not None and len(info.shape) == 3:
                known = [size for size in expected if size is not None]
                if _sizes(info, order) != (sum(N for N, _ in known), known[0][1] if known else 0):
                    return False
        return True

    @property
    def _most(self) -> int:
        said = self.architecture.sizes.get("experts") if self.architecture else None
        return MOST_EXPERTS if said is None else min(said, MOST_EXPERTS)


def _sizes(weight: TensorInfo, order: Stacked) -> tuple[int, int]:
    """(N, K) of a stacked weight; bytes hold two inputs."""
    N, K = reversed(weight.shape[1:3]) if order.inputs_first else weight.shape[1:3]
    return N, K * (2 if weight.dtype == torch.uint8 and len(weight.shape) == 3 else 1)
