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

from qload.architecture.names import WRAPPER, base_name

LayerKind = Literal["", "dense", "sparse"]
Sizes = Mapping[str, int | None]  # None: unknown
# Key -> layer numbers; None without the key, False for another value than a list of numbers.
Lists = Mapping[str, frozenset[int] | Literal[False] | None]
LISTS = ("mlp_only_layers", "moe_layers")


@dataclass(frozen=True)
class Size:
    """An integer of the config.

    `keys`: possible keys, the first one in the config counts. `default`: value without a key, a number or an
    expression of sizes (`hidden/heads`); None: unknown. `null`: value for a null. Defaults are those of
    transformers, as published configs rely on them.
    """

    keys: tuple[str, ...]
    default: int | str | None = None
    null: int | str | None = None


@dataclass(frozen=True)
class Flag:
    """A boolean of the config: the value of `key`, or whether `size` is more than 0."""

    key: str = ""
    default: bool = False
    size: str = ""


@dataclass(frozen=True)
class Row:
    """One matrix, or one tensor, of a model or of each of its layers.

    Attributes
    ----------
    name
        Prefix of a matrix or whole name of a tensor. `{layer}` and `{expert}` stand for numbers,
        `{w1|gate_proj}` for spellings, transformers' first.
    shape
        (N, K) of a matrix, in any format; stored shape of a tensor.
    where
        Kind of layers with this row.
    when
        Flags that are required (`!flag`: that must not be set).
    within
        Names of fused matrices that may store it instead.
    optional
        Whether it may be missing, or is stored within another row.
    tensor
        True for a tensor other than a matrix.
    """

    name: str
    shape: str
    where: LayerKind = ""
    when: str = ""
    within: tuple[str, ...] = ()
    optional: bool = False
    tensor: bool = False


@dataclass(frozen=True)
class Stacked:
    """Layout of the experts of a layer in one tensor.

    `inputs_first`: (E, K, N), as in `x @ w`, instead of (E, N, K). `interleaved`: gate has
    the even outputs of the fused tensor and up the odd ones, instead of the first and the second half.
    """

    inputs_first: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class Table:
    """Table of a model type.

    Attributes
    ----------
    sizes, rows, flags
        Sizes, tensors and flags by name.
    base
        First segments of the decoder's names, missing in some files.
    sparse
        Predicate of layers with experts, by lists, sizes and layer number; None without such layers.
    exempt
        Names of tensors without a reader -> reason.
    head, embedding
        Matrices that `tie_word_embeddings` ties.
    tied
        Default of `tie_word_embeddings`.
    stacked
        Layout of stacked experts.
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
    """Parse a sum of products: each product as (sign, factor) from left to right; ValueError otherwise."""
    tokens = EXPRESSION_TOKEN.findall(text)
    if "".join(tokens) != text or len(tokens) % 2 == 0:
        raise ValueError(f"not a sum of products: {text}")
    products: list[list[tuple[str, str]]] = []
    for sign, factor in zip(["+", *tokens[1::2]], tokens[::2], strict=True):
        if sign == "+":
            products.append([("*", factor)])
        else:
            products[-1].append((sign, factor))
    return tuple(map(tuple, products))


def evaluate_size(text: str, sizes: Mapping[str, int | None]) -> int | None:
    """Value of an expression; None for an unknown size, and for a division by zero."""
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
    """Names of the sizes in an expression."""
    return frozenset(factor for term in parse_terms(text) for _, factor in term if not factor.isdecimal())


ALTERNATIVES = re.compile(r"\{([^{}]*\|[^{}]*)\}")
DIGITS = 18  # maximal length of a layer number
# Prefixes of a text model's names within a multimodal model.
TEXT_MODEL_PREFIXES = (
    "",
    "model.language_model.",
    "model.text_model.",
    "language_model.",
    "thinker.",
    "language.",
    "llm.",
)


@dataclass(frozen=True)
class RowMatch:
    """Match of a name with a row of a table: key, layer and expert.

    `lead`: prefix before the decoder's own name. `bare`: True for a name without the base.
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
    """Lookup keys of the names of a row: `{}` for each number."""
    return tuple(spelled.replace("{layer}", "{}").replace("{expert}", "{}") for spelled in spellings(name))


def spelled(name: str, layer: int | None = None, expert: int | None = None) -> str:
    """Name of a row in the spelling of transformers, with numbers."""
    return spellings(name)[0].replace("{layer}", str(layer)).replace("{expert}", str(expert))


def rows_by_key(table: Table) -> Mapping[str, Row]:
    """Rows of a table by lookup key, for every spelling."""
    return {key: row for row in table.rows for key in row_keys(row.name)}


def find_row(name: str, rows: Mapping[str, Row], base: str) -> RowMatch | None:
    """Find the row of a name, with any prefix of a text model, with or without the decoder's base.

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
                return RowMatch(row, tried, layer, expert, wrapper + lead, bare)
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
