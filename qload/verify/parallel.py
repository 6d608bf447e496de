"""Whether every layer can be shared among N ranks, told from headers and facts alone."""

import re
from collections.abc import Iterator, Sequence

from qload.errors import ArgumentError, CutError, DivideError
from qload.loader import Heads, LayerDescription, Part, Split
from qload.loader.cuts import share
from qload.parallel import Rank
from qload.verify.report import Finding, finding_of
from qload.verify.subject import Subject

# How the linear layers of published models are cut, by the last part of their names.
COLUMN = re.compile(
    r"(q|k|v|qkv|gate|up|gate_up|q_b|kv_b)_proj|w1|w3|fc1|query_key_value|dense_h_to_4h|c_fc|lm_head"
)
ROW = re.compile(r"(o|out|down)_proj|w2|fc2|dense|dense_4h_to_h|c_proj")


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
        name = layer.prefix.rpartition(".")[2]
        split: Split | None = "N" if COLUMN.fullmatch(name) else "K" if ROW.fullmatch(name) else None
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
