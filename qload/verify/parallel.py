"""Whether every layer can be shared among N ranks, told from headers and facts alone."""

from collections.abc import Iterator, Sequence

from qload.errors import ArgumentError, CutError, DivideError
from qload.loader import Heads, LayerDescription, Part, Split
from qload.loader.cuts import share
from qload.parallel import Rank
from qload.plan.usual import usual_split
from qload.verify.report import Finding, finding_of
from qload.verify.subject import Subject


def world_sizes(tp: int | Sequence[int] | None) -> Sequence[int]:
    """The numbers of ranks that are asked for, each once; ArgumentError for less than 1, and for none."""
    if tp is None:
        return ()
    sizes = list(dict.fromkeys(tp if isinstance(tp, Sequence) else (tp,)))
    if not sizes or min(sizes) < 1:
        raise ArgumentError("tp", "at least 1", str(tp))
    return sizes


def check(subject: Subject, tp: int) -> Iterator[Finding | str]:
    """A finding for each layer that its usual cut refuses, a note for layers of no usual cut.

    Where the type of model is known, heads of attention have to stay whole.
    """
    unusual = []
    for layer in subject.described():
        heads = subject.architecture.heads(layer.prefix) if subject.architecture else None
        if heads is not None:
            error = _refusal_of_heads(layer, heads, tp)
            if error:
                yield finding_of(error)
            continue
        split = usual_split(layer.prefix)
        if split:
            error = _refusal(layer, split, tp)
            if error:
                yield finding_of(error)
        elif layer.K > 1 and _refusal(layer, "N", tp) and _refusal(layer, "K", tp):
            unusual.append(layer.prefix)
    if unusual:
        yield f"for {tp} ranks, {len(unusual)} other layers can be cut neither way: {', '.join(unusual[:4])}"


def _refusal_of_heads(layer: LayerDescription, heads: Heads, tp: int) -> CutError | DivideError | None:
    """Why ranks cannot have whole heads of a layer each, those of keys and values repeated where few."""
    try:
        parts = heads.parts([(layer.prefix, layer.N)], tp)
        for part in parts:
            share(layer, part, "N", Rank(0, tp), joined=part is not parts[-1])
    except (CutError, DivideError) as error:
        return error
    return None


def _refusal(layer: LayerDescription, split: Split, tp: int) -> CutError | DivideError | None:
    try:
        share(layer, Part(layer.prefix), split, Rank(0, tp))
    except (CutError, DivideError) as error:
        return error
    return None
