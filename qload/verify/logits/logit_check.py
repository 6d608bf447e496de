"""Check of a model's kernels by its layers and logits, and comparison of its outputs with a reference.

A layer differs from the reference if zeros are as close, or if it is an outlier among its siblings: the
layers of the same name in other blocks with the same storage. The square of its relative error is then more
than `MAX_SPIKE` times the mean of theirs, the limit that `qload.verify.comparison` has for a block of
weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload.checkpoint import Checkpoint
from qload.diagnosis.comparison import effective_weight
from qload.engines.model_types import ModelSizes
from qload.errors import ArgumentError, NotEnoughMemoryError, QloadError
from qload.errors.rules import rule_texts
from qload.models import TextConfig
from qload.models.vision_config import VisionConfig
from qload.verify.comparison import MAX_SPIKE, Distance
from qload.verify.logits.compared_layers import (
    ComparedExperts,
    ComparedLayer,
    Misread,
    ProductFault,
    linears_of,
    weight_bytes,
)
from qload.verify.logits.compared_model import (
    ComparedModel,
    ModelPrompt,
    load_compared,
    read_sizes,
    read_vision_config,
)
from qload.verify.report import Finding, Prompt, finding_of, new_finding

StageProgress = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)


@dataclass
class LogitResult:
    """Result of a comparison.

    Attributes
    ----------
    findings, notes
        Findings and notes of a report.
    numbers
        Plain data: `ids`, `dtype`, the `layers` with the order of their `kernel` and their largest error as a
        `share` of the rounding budget, `departures` from the exact products, and the distances of logits:
        `kernels` to the exact products, and these to a reference, `against`.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def check_logits(
    path: str, prompt: Prompt, against: Any = None, progress: StageProgress | None = None
) -> LogitResult:
    """Run the model of the checkpoint at `path` on a prompt, and compare it with a reference `against`.

    `progress`: called with (stage, bytes done, bytes in all). ArgumentError for a type without a model, and
    for invalid ids; NotEnoughMemoryError for a model that is too large. Faults of the files are findings.
    """
    result, progress = LogitResult(), progress or (lambda *_: None)
    try:
        with Checkpoint.open(path) as checkpoint:
            known = ModelPrompt.of(prompt, path, checkpoint.model_config)
            result.numbers["ids"] = known.ids
            model = load_compared(checkpoint, prompt.device, vision=known.vision is not None)
        if known.images and not prompt.images:
            images, _, height, width = known.images[0].shape
            result.notes.append(f"logits: {images} images of {height} x {width} random pixels in the prompt")
        model.state.report_bytes = _count_bytes(
            model, partial(progress, "logits"), passes=min(len(known.ids), 2)
        )
        exact = model.compute_logits(known)
        _add_layers(model, result)
        model.state.follows = "kernel"
        computed = model.compute_logits(known)
        model.state.follows, model.state.compares = "meaning", False
        _add_logit_distances(exact, computed, result)
        if against is not None:
            _add_reference(model, against, known, prompt.device, result)
    except (ArgumentError, NotEnoughMemoryError):
        raise
    except QloadError as error:
        result.findings.append(finding_of(error))
    return result


def _count_bytes(
    model: ComparedModel, progress: Callable[[int, int], None], passes: int
) -> Callable[[int], None]:
    """Return a function that adds compared bytes and reports their sum, of the text in so many passes."""
    whole, text = (
        sum(weight_bytes(layer.meaning) for layer in part.modules() if isinstance(layer, ComparedLayer))
        for part in (model.model, model.text)
    )
    total = whole + (passes - 1) * text
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    return add


def _add_layers(model: ComparedModel, result: LogitResult) -> None:
    """Add the first faulty layer, and the errors of all layers."""
    state = model.state
    result.numbers["dtype"] = str(model.dtype).removeprefix("torch.")
    result.numbers["layers"] = [
        {"prefix": name, "kernel": state.kernels[name], "share": share} for name, share in state.worst.items()
    ]
    faults = [state.faults[name] for name in state.worst if name in state.faults]
    result.numbers["departures"] = [asdict(fault) for fault, _ in faults]
    if faults:
        (first, read_back), *others = faults
        message = product_message(first, read_back(), len(others))
        result.findings.append(new_finding(rule_texts()["kernel-product"], first.name, None, message))
    if state.overflown:
        more = f"; {len(state.overflown)} layers in all" if len(state.overflown) > 1 else ""
        result.notes.append(
            f"{next(iter(state.overflown))}: activations leave the range of {result.numbers['dtype']}, where "
            f"nothing was compared{more}"
        )


def product_message(first: ProductFault, misread: Misread | None, others: int) -> str:
    """Return the message of a finding about the first faulty layer."""
    message = (
        f"{first.name}: the kernel's product is off by {abs(first.got - first.want):.3g} at (token, n) = "
        f"({first.token}, {first.output}), and rounding explains {first.budget:.3g}; "
        f"{first.wrong} of {first.total} values are wrong"
    )
    if others:
        message += f"; later layers with wrong values: {others}"
    if misread is None:
        return f"{message}\nno value of its weight differs when it is read back alone"
    (name, place), got, want, cause = misread
    message = f"{message}\nits kernel has {got:g} at (n, k) = {place} of {name}, the checkpoint {want:g}"
    return message if cause is None else f"{message}\n{cause}"


def logit_distances(got: Tensor, want: Tensor) -> dict[str, Any]:
    """Return the distances of logits (T, vocab) to others.

    `largest`: the largest difference, as a part of the range of the others; `kl`: the mean KL divergence in
    nats; `greedy`: number of tokens with the same likeliest next token, of all `tokens`.
    """
    got, want = got.double(), want.double()
    ours, theirs = got.log_softmax(1), want.log_softmax(1)
    return {
        "largest": float((got - want).abs().max() / (want.max() - want.min())),
        "kl": float((theirs.exp() * (theirs - ours)).sum(1).mean()),
        "greedy": int((got.argmax(1) == want.argmax(1)).sum()),
        "tokens": got.shape[0],
    }


def distance_note(numbers: dict[str, Any], what: str) -> str:
    """Return a note on the distances of two models' logits."""
    return (
        f"logits of {what} differ by {numbers['largest']:.3g} of their range at most, the likeliest "
        f"token agrees in {numbers['greedy']} of {numbers['tokens']}, mean KL divergence {numbers['kl']:.3g}"
    )


def _add_logit_distances(exact: Tensor, computed: Tensor, result: LogitResult) -> None:
    numbers = logit_distances(computed, exact)
    result.numbers["kernels"] = numbers
    result.notes.append(distance_note(numbers, "kernels and dequantized weights"))


def _add_reference(
    model: ComparedModel, against: Any, prompt: ModelPrompt, device: str, result: LogitResult
) -> None:
    """Add a comparison with another checkpoint of the same model, on the same prompt."""
    with Checkpoint.open(against) as checkpoint:
        config = read_sizes(against, checkpoint.model_config)
        vision = None if prompt.vision is None else read_vision_config(checkpoint.model_config, config)
        sizes, theirs = model_sizes(prompt.config, prompt.vision), model_sizes(config, vision)
        if sizes != theirs:
            result.notes.append(
                f"logits: the reference is another model, {theirs}, not {sizes}: not compared"
            )
            return
        options: dict[str, Any] = {"kernels": False, "vision": vision is not None}
        reference = load_compared(checkpoint, device, model.dtype, **options)
    layers, logits = compare_outputs(model, reference, prompt)
    exact = model.compute_logits(prompt)
    numbers = logit_distances(exact, logits)
    result.numbers["against"] = numbers | {"layers": [layer.to_json() for layer in layers]}
    result.notes.append(distance_note(numbers, "dequantized weights and the reference"))
    result.findings += list(find_outliers(layers, model, reference))


def model_sizes(config: TextConfig | ModelSizes, vision: VisionConfig | None) -> tuple[str | int, ...]:
    """Return the type and the sizes of a model with a config, with those of its vision parts."""
    sizes = config.type, config.layers, config.hidden, config.vocab
    if vision is None:
        return sizes
    tower, resampler = vision.tower, vision.resampler
    return *sizes, tower.layers, tower.hidden, tower.patch, tower.side, resampler.depth, resampler.latents


@dataclass(frozen=True)
class OutputDistance:
    """Distance of one layer, or one part of a fused layer, to the reference's.

    Attributes
    ----------
    name, storage
        Name of the layer, and its storage: format and config.
    path
        Path of its module in the model.
    relative
        Error of its outputs relative to the reference's; zeros have 1.
    """

    name: str
    storage: str
    path: str
    relative: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"prefix": self.name, "relative": self.relative}

    @property
    def kind(self) -> tuple[str, str]:
        """Last segment of the name, and storage; equal for siblings."""
        return self.name.rpartition(".")[2], self.storage


def compare_outputs(
    model: ComparedModel, reference: ComparedModel, prompt: ModelPrompt
) -> tuple[list[OutputDistance], Tensor]:
    """Compare all layers on the reference's inputs; return distances and the reference's logits."""
    sums: dict[tuple[str, str, str], Distance] = {}

    def compare(
        path: str,
        ours: nn.Module,
        module: nn.Module,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        y: Tensor,
    ) -> None:
        got = ours(*inputs, **named)
        for name, storage, outputs in _parts(ours, y.shape[-1]):
            part, want = got[..., outputs].double(), y[..., outputs].double()
            sums.setdefault((name, storage, path), Distance()).add(part, want, part != want)

    hooks = []
    for path in model.layer_paths():
        ours, theirs = (side.model.get_submodule(path) for side in (model, reference))
        hooks.append(theirs.register_forward_hook(partial(compare, path, ours), with_kwargs=True))
    logits = reference.compute_logits(prompt)
    for hook in hooks:
        hook.remove()
    distances = [
        OutputDistance(*key, distance.relative if not distance.exact else 0.0)
        for key, distance in sums.items()
    ]
    return distances, logits


def _parts(layer: nn.Module, width: int) -> Iterator[tuple[str, str, slice]]:
    """Yield the name, storage and outputs of each part of a layer of `width` outputs."""
    for experts in _experts(layer):
        storage = ", ".join(f"{s.format} {s.config}" for s in (experts.gate_up, experts.down))
        yield experts.gate_up.layer.name, storage, slice(0, width)
    start = 0
    for linear in linears_of(layer):
        weight = linear.meaning
        names, parts = weight.layer.name.split(", "), weight.layer.parts
        named = len(names) == len(parts)
        for name, size in zip(names, parts, strict=True) if named else ((weight.layer.name, sum(parts)),):
            yield name, f"{weight.format} {weight.config}", slice(start, min(start + size, width))
            start += size


def find_outliers(
    layers: Sequence[OutputDistance], model: ComparedModel, reference: ComparedModel
) -> Iterator[Finding]:
    """Yield the finding of the first layer too far from its reference, with the worst place of its weight."""
    for layer in layers:
        siblings = [
            sibling.relative**2 for sibling in layers if sibling.kind == layer.kind and sibling is not layer
        ]
        usual = sum(siblings) / len(siblings) if siblings else torch.inf
        if layer.relative >= 1:
            limit = "no closer to the reference's than zeros are"
        elif layer.relative**2 > MAX_SPIKE * usual:
            limit = f"the {len(siblings)} layers like it {usual**0.5:.3g} on average"
        else:
            continue
        message = f"{layer.name}: its outputs have a relative error of {layer.relative:.3g}, {limit}"
        message += _worst_weight(layer, model, reference)
        yield new_finding(rule_texts()["against-output"], layer.name, None, message)
        return


def _worst_weight(layer: OutputDistance, model: ComparedModel, reference: ComparedModel) -> str:
    """Return a line with the largest difference of the weights; "" for different shapes."""
    worst: tuple[float, str, tuple[int, int], float, float] | None = None
    for name, ours, theirs in _matrices(layer, model, reference):
        if ours.shape != theirs.shape:
            return ""
        apart = (ours - theirs).abs().nan_to_num(torch.inf)
        n, k = divmod(int(apart.argmax()), ours.shape[1])
        if worst is None or float(apart[n, k]) > worst[0]:
            worst = float(apart[n, k]), name, (n, k), float(ours[n, k]), float(theirs[n, k])
    if worst is None:
        return ""
    _, name, place, got, want = worst
    return f"\nits weight differs most at (n, k) = {place} of {name}: {got:g}, the reference has {want:g}"


def _matrices(
    layer: OutputDistance, model: ComparedModel, reference: ComparedModel
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name and the effective weights of each matrix of a layer: ours and the reference's."""
    modules = tuple(side.model.get_submodule(layer.path) for side in (model, reference))
    stacks = [_experts(module) for module in modules]
    for ours, theirs in zip(*stacks, strict=False):
        for place in range(ours.shape[0]):
            for weight, other in zip(ours.expert(place), theirs.expert(place), strict=True):
                yield weight.layer.name, effective_weight(weight), effective_weight(other)
    if not any(stacks):
        weight, other = map(_linear_weight, modules)
        rows = next(rows for name, _, rows in _parts(modules[0], weight.shape[0]) if name == layer.name)
        yield layer.name, weight[rows], other[rows]


def _linear_weight(module: nn.Module) -> Tensor:
    """Return the effective weight of a linear layer, its parts joined; a plain layer of transformers too."""
    parts = [effective_weight(linear.meaning) for linear in linears_of(module)]
    return torch.cat(parts) if parts else module.get_parameter("weight")


def _experts(layer: nn.Module) -> list[Any]:
    """Return the loaded experts of a layer: one or none."""
    return [module.meaning for module in layer.modules() if isinstance(module, ComparedExperts)]
