"""Load of the experts of a layer: names, headers, facts and cuts first, then the weights.

Experts are one more axis E of their format's declaration: `"K/8 N"` of a layer is `"E K/8 N"` of its experts.
One expert is described; headers and facts of the others are compared with it. The share of the first expert
gives the slices. Each tensor is read for all experts at once, into the rows of a stack (E, ...); the storage
knows whether experts are separate tensors or slices of one.

A loader that repacks converts runs of experts at once, each run folded into one layer (`folding`).

Formats that convert tensors after a read (`Weight.resolve`), and loaders with their own `load`, load one
expert after another; the results are stacked.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from qload import devices
from qload.dtypes import TORCH
from qload.errors import ArgumentError, MismatchError, RepackError, UnsupportedFormatError
from qload.experts.activation import ExpertFacts, facts_of
from qload.experts.expert_description import (
    DescribedExperts,
    ExpertSource,
    Owner,
    PendingRows,
    bias_name,
    describe_experts,
)
from qload.experts.expert_parallel import ExpertSplit, LocalExperts, grid, local_experts
from qload.experts.folding import fold, has_stored_axes, joined_axis, unfold
from qload.experts.names import ExpertNames, find_experts, stored_tensors
from qload.experts.stacked_storage import StackedLayers
from qload.experts.weight import ExpertsWeight, Stack, StackedWeight, Stacking, differing_experts
from qload.formats.unquantized import FLOATS
from qload.lazy_torch import Tensor, torch
from qload.loader import FormatLoader, LayerDescription, Part, Split, WeightsLoader
from qload.loader.base import LoadedStep
from qload.loader.description import check_alike as check_parts
from qload.loader.description import configs_apart, in_one_convention
from qload.loader.layer_values import check_scales, is_finite
from qload.loader.sharding import Share, shares_of
from qload.loader.source import WrappedSource
from qload.parallel import ProcessGroup
from qload.spec import Layer, Role, TensorSpec, Weight
from qload.spec.weight import tensor_names
from qload.storage.protocol import AskedRows

ELSEWHERE = "of an expert that another rank has"
RUN_BYTES = 8 << 20  # of experts that are repacked at once; two runs are in memory
READ_BYTES = 16 << 20  # of experts that are read at once
DEVICE_RUN_BYTES = 256 << 20  # of both on a GPU


@dataclass(frozen=True)
class Plan:
    """A checked load: names, facts and cuts are the same on every rank, and no weight has been read.

    Attributes
    ----------
    shares
        This rank's shares of gate and up, or of up without a gate, and of down.
    split
        Whether each expert is cut.
    """

    names: ExpertNames
    local: LocalExperts
    described: DescribedExperts
    shares: tuple[list[Share], list[Share]]
    split: bool

    @property
    def experts(self) -> range:
        """Numbers of this rank's experts."""
        return range(self.local.start, self.local.stop)


def load_experts(
    weights: Owner,
    prefix: str,
    split: ExpertSplit | None,
    expert_ranks: int | None,
    facts: ExpertFacts | None,
    *,
    computed: bool = True,
) -> ExpertsWeight:
    """Load the experts of this rank, or its share of each; see `Weights.get_experts`.

    `computed`: whether the activation has to be known; experts without a gate have none that is known.
    """
    plan = plan_experts(weights, prefix, split, expert_ranks)
    gated = plan.names.joined == 2
    if facts is not None and not gated:
        raise ArgumentError("facts", f"None: the experts of {prefix} have no gate", str(facts))
    activation = facts_of(weights.architecture) if gated and computed and facts is None else facts
    described = plan.described
    matrices = range(len(plan.names.naming))
    examined = weights.nonfinite == "error" and len(plan.local) < plan.names.count
    if examined:  # all ranks refuse alike
        _check_stored_scales(weights, described, matrices, range(plan.names.count))
    axes: tuple[Split | None, Split | None] = ("N", "K") if plan.split else (None, None)
    local = plan.experts
    requests = [
        StackRequest(weights, weights.loader, prefix, described, run, local, shares, axis, examined)
        for run, shares, axis in zip((matrices[:-1], matrices[-1:]), plan.shares, axes, strict=True)
    ]
    gate_up, down = _load_stacks(requests)
    biases = _read_biases(weights, plan)
    experts = ExpertsWeight(gate_up, down, activation, plan.local, *biases)
    described.source.commit()
    elsewhere = [run for run in (range(local.start), range(local.stop, plan.names.count)) if run]
    if elsewhere:
        names = [name for run in elsewhere for name in described.all_names(matrices, run)]
        names += [n for run in elsewhere for matrix in matrices for n in _bias_names(plan, matrix, run)]
        stored = (plan.names.lead + name.removeprefix(described.lead) for name in names)
        weights.exempt_by(dict.fromkeys(stored, ELSEWHERE).get)
    return experts


def plan_experts(
    weights: Owner,
    prefix: str,
    split: ExpertSplit | None,
    expert_ranks: int | None = None,
) -> Plan:
    """Check names, headers, facts and all ranks' cuts before a weight is read."""
    groups = grid(split, weights.process_group, expert_ranks)
    names = find_experts(weights, prefix)
    local = local_experts(prefix, names.count, groups.experts)
    source = ExpertSource(weights, groups.tensor)
    described = describe_experts(weights, source, names, names.joined, complete=True)
    *joined, down = described.first
    cut = split in ("tensor", "both")
    shares = (
        _shares(groups.tensor, joined, "N" if cut else None),
        _shares(groups.tensor, (down,), "K" if cut else None),
    )
    return Plan(names, local, described, shares, cut)


def load_stacked(
    loader: WeightsLoader, weights: Owner, prefix: str, layers: StackedLayers, split: Split | None
) -> StackedWeight:
    """Load one matrix of all experts by its stored name; each expert is cut along `split`.

    UnsupportedFormatError for interleaved gate and up; ArgumentError for a cut of joined gate and up.
    """
    if layers.interleaved:
        raise UnsupportedFormatError(
            f"{prefix}: interleaved outputs of {' and '.join(layers.layers)}",
            "one layer cannot have both",
            remedy=f"load {layers.of(0)[0]} and so on, or get_experts({layers.lead!r})",
        )
    if split is not None and len(layers.layers) > 1:
        expected = f"{' or '.join(layers.of(0))}, or get_experts({layers.lead!r}, split='tensor')"
        raise ArgumentError("prefix", expected, f"{prefix}, which is several layers")
    source = ExpertSource(weights, weights.process_group)
    tensors = stored_tensors(weights, layers.lead)[1]
    names = ExpertNames(layers.lead, tuple(layers.layers), layers.count, "", tensors)
    described = describe_experts(weights, source, names, len(layers.layers), complete=False)
    shares = _shares(weights.process_group, described.first, split)
    matrices, experts = range(len(layers.layers)), range(layers.count)
    request = StackRequest(weights, loader, prefix, described, matrices, experts, shares, split, False)
    (stack,) = _load_stacks([request])
    source.commit()
    return StackedWeight(stack, config=stack.config, layer=stack.layer)


def _shares(group: ProcessGroup, layers: Sequence[LayerDescription], split: Split | None) -> list[Share]:
    """This rank's shares of the parts of one weight; the cuts of all ranks are checked."""
    parts = [Part(layer.prefix) for layer in layers]
    return shares_of(group, {layer.prefix: layer for layer in layers}, parts, split)


def _check_stored_scales(
    weights: Owner,
    described: DescribedExperts,
    matrices: Iterable[int],
    experts: Sequence[int],
    tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Raise NonfiniteScaleError for a scale of these experts that is not finite, as it is stored.

    `tensors`: the stacks that were read, for storages with a part of each tensor.
    """
    matrices = list(matrices)
    if not hasattr(weights.storage, "readable") and all(
        _are_finite(weights, described, matrix, spec, experts)
        for matrix in matrices
        for spec in described.first[matrix].specs
        if spec.has_scales
    ):
        return
    for row, expert in enumerate(experts):
        layers = [described.layer(expert, matrix) for matrix in matrices]
        held = {name: stack[row] for name, stack in tensors.items()}
        for part in [layers] if tensors else [[layer] for layer in layers]:
            check_scales(weights, part, held, whole=False)


def _are_finite(
    weights: Owner, described: DescribedExperts, matrix: int, spec: TensorSpec, experts: Sequence[int]
) -> bool:
    """Return whether a tensor of scales is finite in all experts; read in runs of some MiB."""
    if spec.name in described.facts[matrix]:
        return is_finite(described.fact_rows(spec.name, matrix, experts), spec)
    names = described.names[matrix][spec.name][experts[0] : experts[-1] + 1]
    info = weights.info(names[0])
    if not (info.stored_dtype.is_floating_point or spec.is_exponents or spec.scale_bytes):
        return True  # integers, with scales of their own
    step, shape = max(1, READ_BYTES // max(1, info.nbytes)), info.shape
    index: tuple[slice, ...] = ()
    if spec.scale_bytes is not None:
        index = (*(slice(None) for _ in shape[1:]), spec.scale_bytes.slice)
        shape = (*shape[:-1], spec.scale_bytes.stop - spec.scale_bytes.start)
    for at in range(0, len(names), step):
        run = names[at : at + step]
        rows = torch.empty((len(run), *shape), dtype=info.dtype, device="cpu")
        weights.read_rows([(run, index, rows)])
        if not is_finite(rows, spec):
            return False
    return True


# Weights


@dataclass(frozen=True)
class StackRequest:
    """Load of one stack: some matrices of each expert, joined along N.

    `matrices`: numbers of the matrices of an expert; `experts`: this rank's experts; `shares`: this rank's
    shares of the first expert's matrices; `examined`: whether the scales were checked as stored.
    """

    weights: Owner
    loader: WeightsLoader
    name: str
    described: DescribedExperts
    matrices: Sequence[int]
    experts: range
    shares: list[Share]
    split: Split | None
    examined: bool

    @property
    def reads_whole(self) -> bool:
        """True if every rank of the group reads the same."""
        return self.split is None or self.described.source.process_group.size() == 1

    def part(self, start: int, stop: int) -> StackRequest:
        """Request for some of these experts, by their places."""
        return replace(self, experts=self.experts[start:stop])

    def layers(self, expert: int) -> list[LayerDescription]:
        """Descriptions of one expert's matrices."""
        return [self.described.layer(expert, matrix) for matrix in self.matrices]

    def prefixes(self, expert: int) -> tuple[str, ...]:
        """Prefixes of one expert's matrices."""
        return self.described.prefixes[expert][self.matrices[0] : self.matrices[-1] + 1]


def _load_stacks(requests: Sequence[StackRequest]) -> list[Stack]:
    """Load stacks of the same experts: in runs of experts, so that files are read in their order."""
    request, *_ = requests
    steps = request.loader.steps()
    if steps is not None:
        return [_load_in_steps(replace(request, loader=steps[0]), steps[1]) for request in requests]
    readers = [StackReader.of(request) for request in requests]
    if any(reader is None for reader in readers):
        return [_load_one_by_one(request) for request in requests]
    bytes_of_all = sum(reader.expert_bytes for reader in readers if reader)
    on_host = request.weights.device.type == "cpu"
    count = len(request.experts)
    step = max(1, (READ_BYTES if on_host else DEVICE_RUN_BYTES) // max(1, bytes_of_all))
    for at in range(0, count, step):
        runs = [reader.reads(at, min(at + step, count)) for reader in readers if reader]
        request.weights.read_rows([read for run in runs for read in run])
    return [reader.stack() for reader in readers if reader]


def _load_in_steps(request: StackRequest, step: LoadedStep) -> Stack:
    """Load runs of experts, and convert each run at once: the stored form of a run is in memory.

    The first expert is converted alone; the others are compared with it.
    """
    stacking, folds = Stacking(request.name, len(request.experts)), not request.described.others
    with closing(_read_runs(request)) as runs:
        for run, stored in runs:
            if stacking.first is None:
                if not _put_each(run.part(0, 1), step, _part(stored, 0, 1), stacking):
                    return _load_stacks([request])[0]
                run, stored = run.part(1, len(stored)), _part(stored, 1, len(stored))
            folds = folds and (not run.experts or _put_folded(run, step, stored, stacking))
            if not folds:
                _put_each(run, step, stored, stacking)
            del run, stored  # the threads fill the memory of another run
    return stacking.stack()


def _read_runs(request: StackRequest) -> Generator[tuple[StackRequest, Stack], None, None]:
    """Yield runs of experts; threads read the next run while the caller converts one."""
    weights, names = request.weights, [request.described.names[matrix] for matrix in request.matrices]
    size = sum(weights.info(full[0]).nbytes for each in names for full in each.values())
    count, run_bytes = len(request.experts), RUN_BYTES if weights.device.type == "cpu" else DEVICE_RUN_BYTES
    step = max(1, run_bytes // max(1, size))
    bounds = [0, *range(1 + step, count, step), count]  # one more in the first run
    runs = [request.part(*each) for each in pairwise(bounds)]
    ahead: StackReader | None = None
    try:
        for number, run in enumerate(runs):
            reader, ahead = ahead or _begin_run(run), None
            if reader is None:
                yield run, _load_stacks([run])[0]
                continue
            reader.finish()
            if number + 1 < len(runs):
                ahead = _begin_run(runs[number + 1])
            yield run, reader.stack()
    finally:
        if ahead is not None:
            ahead.close()


def _part(stack: Stack, start: int, stop: int) -> Stack:
    """Some layers of a stack: views, no copies."""
    tensors = {field: tensor[start:stop] for field, tensor in stack.tensors.items()}
    return replace(stack, names=stack.names[start:stop], tensors=tensors)


def _begin_run(request: StackRequest) -> StackReader | None:
    """Begin to read a run of experts; None if its loader has no reader for it."""
    reader = StackReader.of(request) if request.loader.steps() is None else None
    if reader is not None:
        reader.begin()
    return reader


def _put_each(request: StackRequest, step: LoadedStep, stored: Stack, stacking: Stacking) -> bool:
    """Convert experts one by one, and add them to a stack; False if equal experts stay as they are stored."""
    for expert, weight in zip(request.experts, stored, strict=True):
        parts = [Part(prefix) for prefix in request.prefixes(expert)]
        converted = step(request.described.source, weight, parts, request.split)
        if converted is weight and stacking.first is None and not request.described.others:
            return False
        stacking.put(converted)
    return True


def _put_folded(request: StackRequest, step: LoadedStep, stored: Stack, stacking: Stacking) -> bool:
    """Convert experts as one layer, and add them to a stack; False: each has to be converted alone."""
    assert stacking.first is not None
    if step.convert_stack(stored.expert(0), stacking.first, stored.tensors, stacking.rows(len(stored))):
        stacking.add_rows(stored.names)
        return True
    weight, source = fold(stored, stacking.first), WrappedSource(request.described.source, ledger="later")
    if weight is None:
        return False
    parts = [Part(prefix) for expert in request.experts for prefix in request.prefixes(expert)]
    try:
        stacking.put_stack(unfold(step(source, weight, parts, request.split), stored))
    except (RepackError, MismatchError):  # of one of them
        return False
    source.commit()
    return True


def _load_one_by_one(request: StackRequest) -> Stack:
    """Load each expert as a layer, straight to its row if the loader can."""
    stacking, loader = Stacking(request.name, len(request.experts)), request.loader
    for expert in request.experts:
        parts = [Part(prefix) for prefix in request.prefixes(expert)]
        if isinstance(loader, FormatLoader):
            weight = loader.load(request.described.source, parts, request.split, out=stacking.places())
        else:
            weight = loader.load(request.described.source, parts, request.split)
        stacking.put(weight)
    return stacking.stack()


class StackReader:
    """Reads one stack: the tensors of all experts (E, ...), by the share of the first expert."""

    def __init__(self, request: StackRequest, loader: FormatLoader, first: list[LayerDescription]) -> None:
        self.request, self.loader, self.shares = request, loader, request.shares
        self.layers = layers = self._complete(first)
        self.tensors: dict[str, Tensor] = {}
        self._reads: list[tuple[list[str], tuple[slice, ...], Tensor]] = []
        self._rows: PendingRows
        self._scales: list[TensorSpec] = []
        self._refuses = request.weights.nonfinite == "error"
        for spec in layers[0].specs:
            if not spec.spent and spec.fact:
                self._add_fact(spec)
            elif not spec.spent:
                self._add_tensor(spec)
            if spec.has_scales and not spec.spent:
                self._scales.append(spec)

    @classmethod
    def of(cls, request: StackRequest) -> StackReader | None:
        """Prepare a load of all experts at once; None if they have to be loaded one by one."""
        loader, first = request.loader, request.layers(request.experts[0])
        if not isinstance(loader, FormatLoader) or type(loader).load is not FormatLoader.load:
            return None
        if not first[0].format.weight_type.keeps_tensors():
            return None
        if len(first) > 1 and first[0].N != first[1].N:
            return None
        for spec in first[0].specs:
            if not (spec.spent or spec.fact or _is_rectangle(spec, request.shares[0])):
                return None
        return cls(request, loader, first)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(stack[:1].nbytes for stack in self.tensors.values())

    def reads(self, start: int, stop: int) -> list[AskedRows]:
        """Reads of a run of experts, counted from this rank's first."""
        return [(names[start:stop], index, out[start:stop]) for names, index, out in self._reads]

    def begin(self) -> None:
        """Begin to read all experts; `finish` or `close` ends it."""
        self._rows = self.request.weights.begin_rows(self.reads(0, len(self.request.experts)))

    def finish(self) -> None:
        """Wait for all reads."""
        self._rows.finish()

    def close(self) -> None:
        """End the reads; the tensors are undefined."""
        self._rows.close()

    def stack(self) -> Stack:
        """Check the scales, move the tensors to the device, and enter names and notes."""
        request, described = self.request, self.request.described
        self._complete_others()
        if self._refuses:
            self._check_scales()
        names = list[str]()
        for expert in request.experts:
            names.append(", ".join(request.prefixes(expert)))
        first, fmt = self.shares[0], self.layers[0].format
        widths = [share.bounds.n1 - share.bounds.n0 for share in self.shares]
        whole = [layer.N for layer in self.layers]
        layer = Layer(
            parts=tuple(whole if request.reads_whole else widths),
            K=first.bounds.k1 - first.bounds.k0,
            whole=(sum(whole), first.layer.K),
            name=request.name,
            activations=fmt.activations,
        )
        self._check_weights(layer, names)
        described.source.take(described.all_names(request.matrices, request.experts))
        for note in described.notes(request.matrices, request.experts):
            described.source.note(note)
        fields = (name for name in tensor_names(fmt.weight_type) if name in self.tensors)
        tensors = {name: self.tensors[name].to(request.weights.device) for name in fields}
        return Stack(fmt.weight_type, fmt.config, layer, tuple(names), tensors)

    def _complete(self, layers: Sequence[LayerDescription]) -> list[LayerDescription]:
        """Complete the descriptions of one expert's matrices by their values."""
        completed = {layer.prefix: self.loader.complete(self.request.weights, layer) for layer in layers}
        if len(layers) == 1:
            return list(completed.values())
        parts = list(in_one_convention(completed).values())
        check_parts(parts)
        return parts

    def _complete_others(self) -> None:
        """Complete the description by the values of all experts; MismatchError for experts of two configs."""
        request, config = self.request, self.layers[0].format.config
        first, *experts = request.experts
        if not experts or self._decides_alike():
            return
        for expert in experts:
            other = self._complete(request.layers(expert))[0].format.config
            config, other = config.like(other), other.like(config)
            one, two = configs_apart(config, other)
            if one != two:
                name, of_first = (", ".join(request.prefixes(each)) for each in (expert, first))
                raise differing_experts(name, "config", one, of_first, two)
        self.layers = [replace(layer, format=replace(layer.format, config=config)) for layer in self.layers]

    def _decides_alike(self) -> bool:
        """Return whether the values of all experts lead to the configs of the first."""
        request = self.request
        for matrix, layer in zip(request.matrices, self.layers, strict=True):
            config, claims = layer.format.config, layer.format.claims
            if not config.by_values or claims is None:
                continue
            if self.loader.judged or hasattr(request.weights.storage, "readable"):
                return False
            rows = self.tensors[config.deciding_field]
            if not request.reads_whole or rows.device.type != "cpu":
                names = request.described.names[matrix][config.deciding_field]
                info, count = request.weights.info(names[0]), len(request.experts)
                rows = torch.empty((count, *info.shape), dtype=info.dtype, device="cpu")
                request.weights.read_rows([(names[request.experts.start : request.experts.stop], (), rows)])
            if not config.decides_alike(claims, rows):
                return False
        return True

    def _add_fact(self, spec: TensorSpec) -> None:
        """Slice the known values of a fact; indices count from the first entry of the share."""
        request = self.request
        index, _, first = self.shares[0].slices_of(spec)
        rows = request.described.fact_rows(spec.name, request.matrices[0], request.experts)
        if spec.is_per_part:  # equal in all parts
            self.tensors[spec.name] = rows.reshape(len(rows), 1).repeat(1, len(self.shares))
            return
        rows = rows[(slice(None), *index)]
        owned = rows.untyped_storage().nbytes() == rows.nbytes or request.weights.device.type != "cpu"
        self.tensors[spec.name] = rows - first if first else rows if owned else rows.clone()

    def _add_tensor(self, spec: TensorSpec) -> None:
        """Allocate a tensor of all experts, and list its reads: of each part, unless all have the same."""
        request, weights, experts = self.request, self.request.weights, self.request.experts
        join = joined_axis(spec) if len(self.shares) > 1 else None
        names = [
            request.described.names[matrix][spec.name][experts.start : experts.stop]
            for matrix in (request.matrices if join is not None else request.matrices[:1])
        ]
        info, index = weights.info(names[0][0]), _stored_slices(spec, self.shares[0])
        shape, extent = list(info.shape or (1,)), 0
        for axis, part in enumerate(index):
            shape[axis] = len(range(*part.indices(shape[axis])))
        if join is not None:
            extent = shape[join]
            shape[join] *= len(names)
        is_cast = spec.role is Role.FLOAT and weights.dtype is not None and info.stored_dtype in FLOATS
        on_cpu = spec.role is Role.SCALE and self._refuses  # until they are checked
        stack = self.tensors[spec.name] = devices.in_large_pages(
            torch.empty(
                (len(experts), *shape),
                dtype=weights.dtype if is_cast else TORCH[info.stored_dtype],
                device="cpu" if on_cpu else weights.device,
            )
        )
        for part_number, stored in enumerate(names):
            out = stack if join is None else stack.narrow(join + 1, part_number * extent, extent)
            out = out if info.shape else out.reshape(len(experts))  # stored as (), one entry a part
            self._reads.append((stored, index, out))

    def _check_scales(self) -> None:
        """Raise NonfiniteScaleError for the first tensor with a scale that is not finite."""
        request, described = self.request, self.request.described
        if not request.reads_whole and not request.examined:
            _check_stored_scales(request.weights, described, request.matrices, request.experts, self.tensors)
            return
        if all(is_finite(self.tensors[spec.name], spec) for spec in self._scales):
            return
        for row, expert in enumerate(request.experts):
            tensors = {name: stack[row] for name, stack in self.tensors.items()}
            check_scales(request.weights, request.layers(expert), tensors, whole=True)

    def _check_weights(self, layer: Layer, names: Sequence[str]) -> None:
        """Check experts against the declaration: the first, or all if their facts or values differ.

        Headers and facts of whole layers were checked before. Facts are on the host: nothing waits for a GPU.
        """
        share, fmt = self.shares[0], self.layers[0].format
        looks_at_values = fmt.weight_type.__post_init__ is not Weight.__post_init__
        whole = len(self.shares) == 1 and share.bounds.all_inputs and layer.parts == (share.bounds.N,)
        if whole and not looks_at_values and len(self.tensors) == len(self.layers[0].specs):
            return
        each = looks_at_values or bool(self.request.described.others)
        for row in range(len(names) if each else 1):
            tensors = {name: stack[row] for name, stack in self.tensors.items()}
            fmt.weight_type(config=fmt.config, layer=replace(layer, name=names[row]), **tensors)


def _is_rectangle(spec: TensorSpec, share: Share) -> bool:
    """Return whether a share is a rectangle of the stored tensor."""
    return not share.slices_of(spec).columns if spec.view is None else has_stored_axes(spec)


def _stored_slices(spec: TensorSpec, share: Share) -> tuple[slice, ...]:
    """Slices of a share along the stored axes; () for all of it."""
    if spec.view is None:
        return share.slices_of(spec).slices
    spans = [share.span(axis) for axis in spec.axes]
    if not any(spans):
        return ()
    return tuple(slice(None) if span is None else slice(*span) for span in spans)


# Biases


def _read_biases(weights: Owner, plan: Plan) -> tuple[Tensor | None, Tensor | None]:
    """Read this rank's biases of gate and up (E, N), and of down.

    Outputs of down are summed over ranks: the first rank of those with the same experts has all its biases.
    """
    source, biased = plan.described.source, plan.described.biased
    joined, down = range(plan.names.joined), plan.names.joined
    gate_up = _read_bias_stack(weights, plan, joined, plan.shares[0]) if biased[0] else None
    if not biased[down]:
        return gate_up, None
    if source.process_group.rank():
        source.take(_bias_names(plan, down, plan.experts))  # added by another rank
        return gate_up, None
    return gate_up, _read_bias_stack(weights, plan, (down,), plan.shares[1])


def _read_bias_stack(weights: Owner, plan: Plan, matrices: Sequence[int], shares: Sequence[Share]) -> Tensor:
    """Biases of all experts (E, N), of one matrix after another."""
    widths = [share.bounds.n1 - share.bounds.n0 for share in shares]
    (first,) = _bias_names(plan, matrices[0], plan.experts[:1])
    dtype = weights.dtype or weights.info(first).dtype
    stack, at = torch.empty((len(plan.experts), sum(widths)), dtype=dtype, device=weights.device), 0
    for matrix, share, width in zip(matrices, shares, widths, strict=True):
        names = _bias_names(plan, matrix, plan.experts)
        index = (slice(share.bounds.n0, share.bounds.n1),)
        weights.read_rows([(names, index, stack[:, at : at + width])])
        plan.described.source.take(names)
        at += width
    return stack


def _bias_names(plan: Plan, matrix: int, experts: Iterable[int]) -> list[str]:
    """Stored names of the biases of one matrix; empty without biases."""
    described = plan.described
    if not plan.described.biased[matrix]:
        return []
    return [bias_name(described.lead + described.prefixes[expert][matrix]) for expert in experts]
