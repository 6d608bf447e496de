"""Schema of the table of one model type: sizes, flags, tensors by name; and lookup of tensor names.

A size may be an expression of other sizes: `heads*head+2*kv*head` is a sum of products, and `/` divides
rounding down. Names are looked up in a table, and the names of a table are never enumerated.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Literal

from qload.architecture.adapters import WRAPPER, base_name

LayerKind = Literal["", "dense", "sparse"]
Sizes = Mapping[str, int | None]  # None: not known
Lists = Mapping[
    str, frozenset[int] | Literal[False] | None
]  # of layers; None: there is none, False: no such list
LISTS = ("mlp_only_layers", "moe_layers")


@dataclass(frozen=True, slots=True)
class Size:
    """A whole number of the config.

    `keys`: where it stands, the first that is there counts. `default`: where it does not, a number or an
    expression of sizes (`hidden/heads`); None: then it is not known. `null`: the same for a null, where that
    differs. Defaults are those of transformers' own configs, which published configs rely on.
    """

    keys: tuple[str, ...]
    default: int | str | None = None
    null: int | str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """A yes or no of the config: a boolean under `key`, or `size` said, and more than 0."""

    key: str = ""
    default: bool = False
    size: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One matrix, or one tensor, of a model or of each of its layers.

    `name`: `{layer}` and `{expert}` stand for their numbers, `{w1|gate_proj}` for spellings, of which the
    first is transformers' own. `shape`: of a matrix its (N, K), however a format stores it; of a `tensor`,
    which `name` names whole, its sizes as they are stored. `where`: in which layers. `when`: the flags that
    have to be set for it to be there (`!flag`: not set). `within`: what holds it too, where it is stored
    fused. `optional`: another row holds it, or nobody misses it.
    """

    name: str
    shape: str
    where: LayerKind = ""
    when: str = ""
    within: tuple[str, ...] = ()
    optional: bool = False
    tensor: bool = False


@dataclass(frozen=True, slots=True)
class Stacked:
    """How the experts of a layer lie in one tensor, where programs store them so.

    `inputs_first`: (E, K, N) as `x @ w` takes it, and not (E, N, K). `interleaved`: of gate and up, which are
    one tensor, the even outputs are the gate's and the odd ones up's, and not the first and the second half.
    """

    inputs_first: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A type of model. `base`: what names of its decoder begin with, which some files leave out.

    `sparse`: whether a layer has experts, of lists, sizes and number; None: no layer has. `exempt`: names
    that may be stored and that nothing reads, with the reason. `head`, `embedding`: the matrices that
    `tie_word_embeddings` makes one, which is `tied` where the config does not say. `stacked`: how experts
    lie in one tensor.
    """

    sizes: Mapping[str, Size]
    rows: tuple[Row, ...]
    flags: Mapping[str, Flag] = field(default_factory=dict)
    base: str = "model"
    sparse: Callable[[Lists, Sizes, int], bool | None] | None = None
    exempt: Mapping[str, str] = field(default_factory=dict)
    head: str = "lm_head"
    embedding: str = "model.embed_tokens"
    tied: bool = False
    stacked: Stacked = Stacked()


EXPRESSION_TOKEN = re.compile(r"[+*/]|\d+|[a-z_]+")


@cache
def parse_terms(text: str) -> tuple[tuple[tuple[str, str], ...], ...]:
    """Each product of a sum, as (sign, factor) from left to right; ValueError where a text is none."""
    tokens = EXPRESSION_TOKEN.findall(text)
    if "".join(tokens) != text or len(tokens) % 2 == 0:
        raise ValueError(f"no sum of products: {text}")
    found: list[list[tuple[str, str]]] = []
    for sign, factor in zip(["+", *tokens[1::2]], tokens[::2], strict=True):
        if sign == "+":
            found.append([("*", factor)])
        else:
            found[-1].append((sign, factor))
    return tuple(map(tuple, found))


def evaluate_size(text: str, sizes: Mapping[str, int | None]) -> int | None:
    """What an expression comes to; None where it needs a size that is not known, or divides by zero."""
    total = 0
    for term in parse_terms(text):
        result = 1
        for sign, factor in term:
            size = int(factor) if factor.isdecimal() else sizes[factor]
            if size is None or (sign == "/" and not size):
                return None
            result = result * size if sign == "*" else result // size
        total += result
    return total


def size_names(text: str) -> frozenset[str]:
    """The sizes that an expression needs."""
    return frozenset(factor for term in parse_terms(text) for _, factor in term if not factor.isdecimal())


ALTERNATIVES = re.compile(r"\{([^{}]*\|[^{}]*)\}")
DIGITS = 18  # of a number in a name; a longer one is no number of a layer
# What the names of a text model begin with inside of models that see or hear too.
TEXT_MODEL_PREFIXES = (
    "",
    "model.language_model.",
    "model.text_model.",
    "language_model.",
    "thinker.",
    "language.",
    "llm.",
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a name stands in a table: its row, its layer and expert.

    `lead`: what comes before the decoder's own name. `bare`: the base of that name is left out.
    """

    row: Row
    key: str
    layer: int | None
    expert: int | None
    lead: str
    bare: bool


def spellings(name: str) -> tuple[str, ...]:
    """`{w1|gate_proj}.weight` -> `w1.weight` and `gate_proj.weight`."""
    pieces = ALTERNATIVES.split(name)
    choices = [piece.split("|") if at % 2 else [piece] for at, piece in enumerate(pieces)]
    return tuple(map("".join, product(*choices)))


def row_keys(name: str) -> tuple[str, ...]:
    """What the names that a pattern stands for are looked up by: all numbers are `{}`."""
    return tuple(spelled.replace("{layer}", "{}").replace("{expert}", "{}") for spelled in spellings(name))


def spelled(name: str, layer: int | None = None, expert: int | None = None) -> str:
    """A pattern as transformers writes it, with its numbers."""
    return spellings(name)[0].replace("{layer}", str(layer)).replace("{expert}", str(expert))


def rows_by_key(table: Table) -> Mapping[str, Row]:
    """Every spelling of every row."""
    return {key: row for row in table.rows for key in row_keys(row.name)}


def find_row(name: str, rows: Mapping[str, Row], base: str) -> Place | None:
    """The row that a name belongs to, under any of the leads, with the decoder's own base or without it.

    PEFT's segments of a name are ignored.
    """
    wrapper, name = WRAPPER * name.startswith(WRAPPER), base_name(name)
    for lead in TEXT_MODEL_PREFIXES:
        if not name.startswith(lead):
            continue
        key, numbers = _replace_numbers(name[len(lead) :])
        for tried, bare in ((key, False), (f"{base}.{key}", True)):
            row = rows.get(tried)
            if row is not None:
                layer, expert, *_ = (*numbers, None, None)
                return Place(row, tried, layer, expert, wrapper + lead, bare)
    return None


def tails(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b.c`, `b.c`, `c`."""
    while name:
        yield name
        name = name.partition(".")[2]


def _replace_numbers(name: str) -> tuple[str, list[int]]:
    parts, numbers = name.split("."), []
    for at, part in enumerate(parts):
        if len(part) <= DIGITS and part.isascii() and part.isdecimal() and str(int(part)) == part:
            numbers.append(int(part))
            parts[at] = "{}"
    return ".".join(parts), numbers
