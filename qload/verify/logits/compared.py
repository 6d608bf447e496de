"""A model through kernels and through what its weights mean: findings, notes, and the numbers of both."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qload.detect import read_model_config
from qload.errors import ArgumentError, NotEnoughMemoryError, QloadError
from qload.verify.logits.opened import Watched, watched
from qload.verify.logits.prompt import config_of, ids_of, logits_of
from qload.verify.logits.reference import beside, outliers
from qload.verify.logits.watched import Departure, Misread, WatchedExperts, WatchedLinear, held
from qload.verify.prompt import Prompt
from qload.verify.report import Finding, finding_of

PRODUCT = "kernel-product"
Tell = Callable[[str, int, int], None]


@dataclass
class Compared:
    """What was found.

    Attributes
    ----------
    findings, notes
        As a report has them.
    numbers
        Plain data for a program: `ids`, `dtype`, the `layers` with the order of their `kernel` and the
        `share` of what rounding can cost that each came to, `departures`, and how far the logits of
        `kernels` are from those of the meaning, and these from those of a reference, `against`.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)


@torch.no_grad()
def check_logits(path: str, prompt: Prompt, against: Any = None, tell: Tell | None = None) -> Compared:
    """The model of the checkpoint at `path` on a prompt, and beside that of a reference `against`.

    `tell`: called with a stage, how much of it is done, and how much there is. ArgumentError for a type
    without a model, and for ids that are none of it; NotEnoughMemoryError for a model that is too large. What
    the files hold is a finding.
    """
    known, found = config_of(read_model_config(path)), Compared()
    ids, tell = ids_of(prompt, known), tell or (lambda *_: None)
    found.numbers["ids"] = ids
    try:
        own = watched(path, prompt.device)
        own.watch.tell = _counting(own.model, partial(tell, "logits"), passes=min(len(ids), 2))
        meant = logits_of(own.model, ids, own.dtype, prompt.device)
        _layers(own, found)
        own.watch.follows = "kernel"
        computed = logits_of(own.model, ids, own.dtype, prompt.device)
        own.watch.follows, own.watch.compares = "meaning", False
        _whole(meant, computed, found)
        if against is not None:
            _beside(own, against, ids, prompt.device, found)
    except (ArgumentError, NotEnoughMemoryError):
        raise
    except QloadError as error:
        found.findings.append(finding_of(error))
    return found


def _counting(model: nn.Module, tell: Callable[[int, int], None], passes: int) -> Callable[[int], None]:
    """What is told of bytes that were compared, of all that will be."""
    layers = (each for each in model.modules() if isinstance(each, WatchedLinear | WatchedExperts))
    total = passes * sum(held(each.meaning) for each in layers)
    done = 0

    def compared(size: int) -> None:
        nonlocal done
        done += size
        tell(done, total)

    return compared


def _layers(own: Watched, found: Compared) -> None:
    """The first layer that departs, and how near all others came."""
    watch = own.watch
    found.numbers["dtype"] = str(own.dtype).removeprefix("torch.")
    found.numbers["layers"] = [
        {"prefix": name, "kernel": watch.kernels[name], "share": share} for name, share in watch.worst.items()
    ]
    apart = [watch.departures[name] for name in watch.worst if name in watch.departures]
    found.numbers["departures"] = [asdict(each) for each, _ in apart]
    if apart:
        (first, read_back), *others = apart
        message = said_of(first, read_back(), len(others))
        found.findings.append(Finding(PRODUCT, "error", first.name, None, message))
    if watch.overflown:
        more = f"; {len(watch.overflown)} layers in all" if len(watch.overflown) > 1 else ""
        found.notes.append(
            f"{next(iter(watch.overflown))}: activations leave the range of {found.numbers['dtype']}, where "
            f"nothing was compared{more}"
        )


def said_of(first: Departure, misread: Misread | None, others: int) -> str:
    """What a finding says of the first layer that departs."""
    said = (
        f"{first.name}: the kernel's product is off by {abs(first.got - first.want):.3g} at (token, n) = "
        f"({first.token}, {first.output}), where rounding can cost {first.budget:.3g}; "
        f"{first.wrong} of {first.total} are"
    )
    if others:
        said += f"; {others} after it depart too"
    if misread is None:
        return f"{said}\nno number of its weight, read back by itself, is another one"
    (name, place), got, want, explained = misread
    said = f"{said}\nits kernel has {got:g} at (n, k) = {place} of {name}, the checkpoint {want:g}"
    return said if explained is None else f"{said}\n{explained}"


def distances(got: Tensor, want: Tensor) -> dict[str, Any]:
    """How far logits (T, vocab) are from others.

    `largest`: the largest difference, as a part of the range of the others; `kl`: the mean divergence of the
    distributions, in nats; `greedy`: of how many tokens the likeliest is the same, and `tokens`: of how many.
    """
    got, want = got.double(), want.double()
    ours, theirs = got.log_softmax(-1), want.log_softmax(-1)
    return {
        "largest": float((got - want).abs().max() / (want.max() - want.min())),
        "kl": float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
        "greedy": int((got.argmax(-1) == want.argmax(-1)).sum()),
        "tokens": got.shape[0],
    }


def said_of_logits(numbers: dict[str, Any], what: str) -> str:
    """A note on the distances of two models' logits."""
    return (
        f"logits: those of {what} differ by {numbers['largest']:.3g} of their range at most, the likeliest "
        f"token agrees in {numbers['greedy']} of {numbers['tokens']}, mean KL divergence {numbers['kl']:.3g}"
    )


def _whole(meant: Tensor, computed: Tensor, found: Compared) -> None:
    numbers = distances(computed, meant)
    found.numbers["kernels"] = numbers
    found.notes.append(said_of_logits(numbers, "kernels and of dequantized weights"))


def _beside(own: Watched, against: Any, ids: Sequence[int], device: str, found: Compared) -> None:
    """Another checkpoint of the same model, on the same ids."""
    other = watched(against, device, own.dtype, kernels=False)
    sizes, theirs = ((w.config.type, w.config.layers, w.config.hidden, w.config.vocab) for w in (own, other))
    if sizes != theirs:
        found.notes.append(f"logits: the reference is another model, {theirs}, not {sizes}: not compared")
        return
    layers, logits = beside(own, other, ids, device)
    meant = logits_of(own.model, ids, own.dtype, device)
    numbers = distances(meant, logits)
    found.numbers["against"] = numbers | {"layers": [each.numbers() for each in layers]}
    found.notes.append(said_of_logits(numbers, "dequantized weights and of the reference"))
    found.findings += list(outliers(layers, own, other))
