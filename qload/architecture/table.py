"""Schema of the table of one model type: sizes, flags, tensors by name; and lookup of tensor names.

A size may be an expression of other sizes: `heads*head+2*kv*head` is a sum of products, and `/` divides
rounding down. Names are looked up in a table, and the names of a table are never enumerated.

A predicate of layers is a text over the layer number `i`, such as `not i < first and experts > 0`. Its terms:
`i < size`, `(i + 1) % size == 0` or another size, `size > 1`, `i in key` and `key[i] == value`, each with or
without `not`. `key` is a list in the config; `i in key else TERM` and `key[i] == value else TERM` have a term
for a config without the list.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import chain, product
from typing import Any, Literal

from qload.architecture.names import WRAPPER, base_name

Sizes = Mapping[str, int | None]  # None: unknown


@dataclass(frozen=True)
class Size:
    """An integer of the config.

    `keys`: possible keys, the first one in the config counts; `vision_config.depth` is a key of a section,
    and `layer_types[]` the length of a list. `default`: value without a key, a number or an expression of
    sizes (`hidden/heads`); None: unknown. `null`: value for a null. Defaults are those of transformers, as
    published configs rely on them.
    """

    keys: tuple[str, ...]
    default: int | str | None = None
    null: int | str | None = None


@dataclass(frozen=True)
class Flag:
    """A boolean of the config: the value of `key`, or whether `size` is more than 0.

    `given`: whether the value of `key` is no null, instead of the value. `equals`: whether it is this text.
    """

    key: str = ""
    default: bool | None = False
    size: str = ""
    given: bool = False
    equals: str = ""


@dataclass(frozen=True)
class Row:
    """One matrix, or one tensor, of a model or of each of its layers.

    Attributes
    ----------
    name
        Prefix of a matrix or whole name of a tensor. `{layer}`, `{expert}` and `{number}` (of another list)
        stand for numbers, `{w1|gate_proj}` for spellings, transformers' first.
    shape
        (N, K) of a matrix, in any format; stored shape of a tensor.
    where
        Predicate of the layers with this row (`!predicate`: of the layers without it).
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
    where: str = ""
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
    predicates
        Predicates of layers by name; layers with experts are `sparse`.
    exempt
        Names of tensors without a reader -> reason.
    head, embedding
        Matrices that `tie_word_embeddings` ties.
    tied, ties
        Default of `tie_word_embeddings`, and whether the model regards it.
    stacked
        Layout of stacked experts.
    classes
        Classes of transformers with these tensors; empty for all usual ones.
    sections
        Model types of sections of the config, such as `vision_config`.
    text
        Section of a text model with its own table: this one has the tensors around it alone.
    """

    sizes: Mapping[str, Size]
    rows: tuple[Row, ...]
    flags: Mapping[str, Flag] = field(default_factory=dict)
    base: str = "model"
    predicates: Mapping[str, str] = field(default_factory=dict)
    exempt: Mapping[str, str] = field(default_factory=dict)
    head: str = "lm_head"
    embedding: str = "model.embed_tokens"
    tied: bool = False
    ties: bool = True
    stacked: Stacked = Stacked()
    classes: tuple[str, ...] = ()
    sections: Mapping[str, str] = field(default_factory=dict)
    text: str = ""

    @cached_property
    def kinds(self) -> Mapping[str, frozenset[str]]:
        """Values that predicates name, by the key of their list."""
        found: dict[str, frozenset[str]] = {}
        for term in chain.from_iterable(map(parse_predicate, self.predicates.values())):
            if term["kinds"] and term["kind"]:
                found[term["kinds"]] = found.get(term["kinds"], frozenset()) | {term["kind"]}
        return found


EXPRESSION_TOKEN = re.compile(r"[+*/]|\d+|[a-z_][a-z_0-9]*")
ABSENT = object()


def read_key(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, possibly within a section, or the length of a list; ABSENT without one."""
    value: Any = config
    for part in key.removesuffix("[]").split("."):
        value = value.get(part, ABSENT) if isinstance(value, Mapping) else ABSENT
    if key.endswith("[]"):
        return len(value) if isinstance(value, list) else ABSENT
    return value


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


def size_names(text: str, divisors: bool = True) -> frozenset[str]:
    """Names of the sizes in an expression; `divisors`: with the sizes after a `/`."""
    return frozenset(
        factor
        for term in parse_terms(text)
        for sign, factor in term
        if not factor.isdecimal() and (divisors or sign == "*")
    )


TERM = re.compile(
    r"(?P<inverse>not )?"
    r"(?:i < (?P<first>\w+)|\(i \+ (?P<shift>\d+)\) % (?P<period>\w+) == (?P<rest>\w+)"
    r"|(?P<size>\w+) > (?P<least>\d+)"
    r"|i in (?P<members>[\w.]+)(?: else (?P<default>.+))?"
    r"|(?P<kinds>[\w.]+)\[i\] == (?P<kind>\w+)(?: else (?P<derived>.+))?)"
)


@cache
def parse_predicate(text: str) -> tuple[Mapping[str, str | None], ...]:
    """Parse a predicate of layers into terms, by the groups of TERM; ValueError otherwise."""
    terms = [TERM.fullmatch(term) for term in text.split(" and ")]
    if None in terms:
        raise ValueError(f"not a predicate of layers: {text}")
    return tuple(term.groupdict() for term in terms if term is not None)


@dataclass(frozen=True)
class LayerList:
    """A list of the config: its members, and these as layer numbers, or None if some are no integers."""

    members: Sequence[Any]
    layers: frozenset[int] | None


Lists = Callable[
    [str], LayerList | Literal[False] | None
]  # by key; None without one, False for another value


def read_list(
    config: Mapping[str, Any], key: str, kinds: frozenset[str] = frozenset()
) -> LayerList | Literal[False] | None:
    """Read a list of the config; None without one, False for another value.

    `kinds`: values that predicates name. False also for a list with others, if there are several: the config
    spells them in another way.
    """
    value = read_key(config, key)
    if value is None or value is ABSENT:
        return None
    if not isinstance(value, list):
        return False
    if len(kinds) > 1 and not kinds.issuperset(map(str, value)):
        return False
    numbers = all(type(member) is int for member in value)
    return LayerList(value, frozenset(value) if numbers else None)


def evaluate_predicate(text: str, lists: Lists, sizes: Sizes, layer: int) -> bool | None:
    """Value of a predicate for a layer; None for an unknown size or list."""
    terms = [_evaluate_term(term, lists, sizes, layer) for term in parse_predicate(text)]
    return None if None in terms else all(terms)


def _evaluate_term(term: Mapping[str, str | None], lists: Lists, sizes: Sizes, layer: int) -> bool | None:
    value: bool | None
    if key := term["members"]:
        value = _is_member(lists(key), term["default"], lists, sizes, layer)
    elif key := term["kinds"]:
        listed, derived = lists(key), term["derived"]
        if listed is None and derived:
            value = evaluate_predicate(derived, lists, sizes, layer)
        else:
            value = _is_kind(listed, term["kind"], layer)
    else:
        size = evaluate_size(term["first"] or term["period"] or term["size"] or "0", sizes)
        if size is None:
            value = None
        elif term["first"]:
            value = layer < size
        elif term["size"]:
            value = size > int(term["least"] or 0)
        else:
            rest = evaluate_size(term["rest"] or "0", sizes)
            value = None if rest is None else size > 0 and (layer + int(term["shift"] or 0)) % size == rest
    return None if value is None else value is not bool(term["inverse"])


def _is_member(
    listed: LayerList | Literal[False] | None, default: str | None, lists: Lists, sizes: Sizes, layer: int
) -> bool | None:
    if listed is None:
        return evaluate_predicate(default, lists, sizes, layer) if default else False
    return None if not listed or listed.layers is None else layer in listed.layers


def _is_kind(listed: LayerList | Literal[False] | None, kind: str | None, layer: int) -> bool | None:
    if not listed or layer >= len(listed.members) or not isinstance(listed.members[layer], str | int):
        return None
    return str(listed.members[layer]) == kind


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


PLACEHOLDER = re.compile(r"\{(layer|expert|number)\}")


def row_keys(name: str) -> tuple[str, ...]:
    """Lookup keys of the names of a row: `{}` for each number."""
    return tuple(PLACEHOLDER.sub("{}", spelled) for spelled in spellings(name))


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
                places = dict(zip(PLACEHOLDER.findall(row.name), numbers, strict=True))
                layer, expert = places.get("layer"), places.get("expert")
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
