"""Table of a model type from its samples, as data."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from qload.architecture.names import TOWER
from qload.architecture.table import evaluate_size
from tests.model_tables.build import Sample
from tests.model_tables.draw import LAYERS
from tests.model_tables.fit import Expressions, Truths, conjunctions

UNKNOWN = "unknown"
# Names of sizes that the library knows, by the last part of a field's name.
KNOWN = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "ffn": ("intermediate_size", "ffn_dim", "ffn_hidden_size"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv": ("num_key_value_heads",),
    "head": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "moe": ("moe_intermediate_size",),
}


@dataclass
class Drawn:
    """One row: its places in samples, and what explains them.

    `places`: number of a sample -> layer (or -1) -> shapes.
    """

    key: str
    name: str
    places: dict[int, dict[int, set[tuple[int, ...]]]] = field(default_factory=dict)
    shape: str = ""
    where: str = ""
    when: str = ""
    optional: bool = False

    @property
    def tensor(self) -> bool:
        """True for a tensor other than a matrix."""
        return len(self.shape.split()) != 2 or not self.matrix

    @cached_property
    def matrix(self) -> bool:
        """Whether it has the name of a matrix, and two axes."""
        ranks = {
            len(shape) for layers in self.places.values() for shapes in layers.values() for shape in shapes
        }
        return ranks == {2} and self.name.endswith(".weight")


def key_of(name: str) -> tuple[str, tuple[int, ...]]:
    """`layers.3.mlp.experts.7.w1` -> `layers.{}.mlp.experts.{}.w1` and (3, 7)."""
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    return ".".join("{}" if part.isdecimal() else part for part in parts), numbers


class Fitted:
    """Rows, sizes and conditions of a model type, fitted to samples."""

    def __init__(
        self, samples: Sequence[Sample], declared: frozenset[str], section: str = "", with_layers: bool = True
    ) -> None:
        self.samples = samples
        self.declared = declared
        self.transposed = {key_of(name)[0] for sample in samples for name in sample.transposed}
        self.nulls: dict[str, str] = {}  # field -> expression of its value for a null
        self.section = section
        self.list, self.count = "", ""
        if with_layers:
            self.list, self.count = self._decoder_list()
            self.section = self.count.rpartition(".")[0]
        self.rows = self._rows()
        self._expressions: dict[tuple[tuple[int, ...], bool], Expressions] = {}
        self.predicates: dict[str, str] = {}
        self.flags: dict[str, tuple[str, bool, str]] = {}
        for row in self.rows:
            self._fit_shape(row)
        self._fit_presence()

    # Names.

    def _decoder_list(self) -> tuple[str, str]:
        """Lead of the list of decoder layers, and the field with their number."""
        counts: list[Counter[str]] = []
        patterns: dict[str, set[str]] = defaultdict(set)
        for sample in self.samples:
            found: Counter[str] = Counter()
            for name in sample.shapes:
                key, numbers = key_of(name)
                if numbers:
                    lead = key.partition(".{}")[0] if not key.startswith("{}") else ""
                    found[lead] = max(found[lead], numbers[0] + 1)
                    patterns[lead].add(key)
            counts.append(found)
        best = ("", "", -1)
        for lead, keys in patterns.items():
            for path in sorted(self.integers, key=lambda path: (path.endswith("[]"), len(path))):
                if not path.startswith(f"{self.section}." * bool(self.section)):
                    continue
                if (LAYERS.fullmatch(path.rpartition(".")[2]) or path.endswith("[]")) and all(
                    sample.flat.get(path) == found[lead]
                    for sample, found in zip(self.samples, counts, strict=True)
                ):
                    if len(keys) > best[2]:
                        best = (lead, path, len(keys))
                    break
        if not best[1]:
            raise ValueError("no list of layers has a length of the config")
        return best[0], best[1]

    @cached_property
    def names(self) -> list[str]:
        """Names of the fields in any sample."""
        return list(dict.fromkeys(name for sample in self.samples for name in sample.flat))

    @cached_property
    def integers(self) -> list[str]:
        """Fields with an integer in some sample, and no other value but null."""
        found = []
        for name in self.names:
            values = [sample.flat.get(name) for sample in self.samples]
            if any(type(value) is int for value in values) and all(
                value is None or (type(value) is int and 0 <= value < 1 << 40) for value in values
            ):
                found.append(name)
        return found

    @cached_property
    def varying(self) -> list[str]:
        """Integers that vary, without copies of others; fields of the decoder and declared ones first."""
        seen: dict[tuple[Any, ...], str] = {}
        order = sorted(
            (name for name in self.integers if not name.endswith("[]")),
            key=lambda name: (name not in self.declared, name.rpartition(".")[0] != self.section, len(name)),
        )
        for name in order:
            values = tuple(self.value(at, name) for at in range(len(self.samples)))
            if len(set(values)) > 1:
                seen.setdefault(values, name)
        return list(seen.values())

    def value(self, at: int, name: str) -> int | None:
        """Value of a size in a sample; a null of some sizes follows from others."""
        flat = self.samples[at].flat
        value, section = flat.get(name), name.removesuffix(name.rpartition(".")[2])
        if value is None and name == f"{section}num_key_value_heads":
            return self._named(flat, section, "heads")
        if value is None and name == f"{section}head_dim":
            hidden, heads = self._named(flat, section, "hidden"), self._named(flat, section, "heads")
            return hidden // heads if hidden and heads else None
        if value is None and name in self.nulls:
            return self._evaluate(self.nulls[name], at)
        return value if type(value) is int else None

    def _evaluate(self, text: str, at: int) -> int | None:
        """Value of an expression of fields in a sample."""
        names = {name: f"size_{number}" for number, name in enumerate(re.findall(r"[A-Za-z_][\w.]*", text))}
        values = {size: self.value(at, name) for name, size in names.items()}
        return evaluate_size(re.sub(r"[A-Za-z_][\w.]*", lambda found: names[found[0]], text), values)

    def _named(self, flat: Mapping[str, Any], section: str, size: str) -> int | None:
        values = (flat.get(f"{section}{leaf}") for leaf in KNOWN[size])
        return next((value for value in values if type(value) is int), None)

    def _rows(self) -> list[Drawn]:
        rows: dict[str, Drawn] = {}
        for at, sample in enumerate(self.samples):
            for name, shape in sample.shapes.items():
                key, numbers = key_of(name)
                row = rows.get(key)
                if row is None:
                    row = rows[key] = Drawn(key, self._row_name(key))
                layer = numbers[0] if "{layer}" in row.name else -1
                row.places.setdefault(at, {}).setdefault(layer, set()).add(shape)
        return sorted(rows.values(), key=lambda row: ("{layer}" in row.name, "{" in row.name, row.name))

    def _row_name(self, key: str) -> str:
        parts = key.split(".")
        lead = ".".join((*filter(None, [self.list]), "{}"))
        if key == lead or key.startswith(f"{lead}."):
            parts[lead.count(".")] = "{layer}"
            for at, part in enumerate(parts):
                if part == "{}" and parts[at - 1] == "experts" and "{expert}" not in parts:
                    parts[at] = "{expert}"
        return ".".join("{number}" if part == "{}" else part for part in parts)

    # Shapes.

    def _fit_shape(self, row: Drawn) -> None:
        places = tuple(
            at
            for at, layers in row.places.items()
            if len({s for shapes in layers.values() for s in shapes}) == 1
        )
        shapes = [next(iter(next(iter(row.places[at].values())))) for at in places]
        ranks = {len(shape) for shape in shapes}
        if len(places) != len(row.places) or len(ranks) != 1:
            row.shape = " ".join([UNKNOWN] * (2 if row.matrix else 1))
            return
        columns = [[shape[axis] for shape in shapes] for axis in range(ranks.pop())]
        dims = [self._explain(places, column) or self._explain_null(places, column) for column in columns]
        row.shape = " ".join(dim or UNKNOWN for dim in dims)

    def _explain(self, places: tuple[int, ...], target: Sequence[int]) -> str | None:
        """Explain values by declared fields, then by all fields, then in the samples without nulls."""
        found = self._expressions_of(places, True).explain(target)
        if found is None and self.declared.issuperset(self.varying):
            return None
        return found or self._expressions_of(places, False).explain(target)

    def _explain_null(self, places: tuple[int, ...], target: Sequence[int]) -> str | None:
        """Explain values by a field in the samples that have it, and by others in those with a null."""
        values = dict(zip(places, target, strict=True))
        for name in self.varying:
            given = tuple(at for at in places if self.value(at, name) is not None)
            rest = tuple(at for at in places if at not in given)
            if name not in self.declared or len(given) < 3 or len(rest) < 3:
                continue
            if any(self.value(at, name) != values[at] for at in given):
                continue
            text = self._explain(rest, [values[at] for at in rest])
            if text is not None and name not in text:
                self.nulls[name] = text
                self._expressions.clear()
                return name
        return None

    def _expressions_of(self, places: tuple[int, ...], declared: bool) -> Expressions:
        if (places, declared) not in self._expressions:
            names = [name for name in self.varying if name in self.declared or not declared]
            sizes = {
                name: values
                for name in names
                if None not in (values := [self.value(at, name) for at in places])
            }
            self._expressions[places, declared] = Expressions.of(sizes, len(places))
        return self._expressions[places, declared]

    # Presence.

    @cached_property
    def points(self) -> list[tuple[int, int]]:
        """Layers of all samples: (sample, layer)."""
        counts = [sample.flat[self.count] if self.count else 0 for sample in self.samples]
        return [(at, layer) for at, count in enumerate(counts) for layer in range(count)]

    def _config_literals(self) -> Iterator[tuple[str, list[bool]]]:
        """Yield conditions on the config: text, and value in each sample."""
        for name in sorted(self.names, key=lambda name: name not in self.declared):
            values = [sample.flat.get(name) for sample in self.samples]
            texts = {value for value in values if isinstance(value, str)}
            if all(isinstance(value, bool) for value in values):
                yield f"bool {name}", [bool(value) for value in values]
            elif any(value is None for value in values) and not all(value is None for value in values):
                yield f"given {name}", [value is not None for value in values]
            elif name in self.integers and {0} < set(values):
                yield f"size {name}", [bool(value) for value in values]
            if 1 < len(texts) < 5 and all(isinstance(value, str) for value in values):
                for text in sorted(texts):
                    yield f"equals {name} {text}", [value == text for value in values]

    def _layer_literals(self) -> Iterator[tuple[str, list[bool]]]:
        """Yield conditions on layers: text of a predicate, and value at each point."""
        for name in self.names:
            lists = [sample.flat.get(name) for sample in self.samples]
            if not all(isinstance(value, list | None) for value in lists) or not any(lists):
                continue
            lists = [value or [] for value in lists]
            members = {str(member) for value in lists for member in value if isinstance(member, int | str)}
            if all(
                len(value) >= sample.flat[self.count]
                for value, sample in zip(lists, self.samples, strict=True)
            ):
                for member in sorted(members)[:8]:
                    if re.fullmatch(r"\w+", member):
                        yield f"{name}[i] == {member}", [str(lists[at][i]) == member for at, i in self.points]
            if all(type(member) is int for value in lists for member in value):
                yield f"i in {name}", [i in lists[at] for at, i in self.points]
        yield "i < 1", [i < 1 for _, i in self.points]
        yield from self._offsets()
        for name in self.integers:
            values = [self.value(at, name) for at in range(len(self.samples))]
            if None in values:
                continue
            counts = np.array(values, np.int64)
            for least in (0, 1):
                if least in values and (counts > least).any():
                    yield f"{name} > {least}", [values[at] > least for at, _ in self.points]
        own = [
            name for name in self.varying if name.rpartition(".")[0] == self.section and name != self.count
        ]
        sizes = {name: [self.value(at, name) for at in range(len(self.samples))] for name in own}
        for name, values in sizes.items():
            if None in values:
                continue
            yield f"i < {name}", [i < values[at] for at, i in self.points]
            for shift in (0, 1):
                text = f"(i + {shift}) % {name} == 0"
                yield text, [values[at] > 0 and (i + shift) % values[at] == 0 for at, i in self.points]

    def _offsets(self) -> Iterator[tuple[str, list[bool]]]:
        """Yield conditions of a period with an offset: `attn_layer_period`, `attn_layer_offset`."""
        for name in self.varying:
            offset = name.replace("period", "offset")
            if offset != name and offset in self.integers:
                pairs = [(self.value(at, name) or 0, self.value(at, offset) or 0) for at, _ in self.points]
                places = zip(pairs, self.points, strict=True)
                values = [period > 0 and i % period == rest for (period, rest), (_, i) in places]
                yield f"(i + 0) % {name} == {offset}", values

    def _fit_presence(self) -> None:
        config = dict(self._config_literals())
        literals: dict[str, Truths] = {}
        for text, values in config.items() if self.count else ():
            literals[text] = np.array([values[at] for at, _ in self.points], bool)
        for text, values in self._layer_literals() if self.count else ():
            literals[text] = np.array(values, bool)
        literals |= {f"!{text}": ~value for text, value in literals.items()}
        whole = {text: np.array(values, bool) for text, values in config.items()}
        whole |= {f"!{text}": ~value for text, value in whole.items()}
        for row in self.rows:
            if "{number}" in row.name:
                row.optional = True
            elif "{layer}" in row.name:
                target = np.array([layer in row.places.get(at, {}) for at, layer in self.points], bool)
                self._fit_row(row, target, literals)
            else:
                self._fit_row(
                    row, np.array([at in row.places for at in range(len(self.samples))], bool), whole
                )

    def _fit_row(self, row: Drawn, target: Truths, literals: Mapping[str, Truths]) -> None:
        found = next(conjunctions(target, literals), None)
        if found is not None:
            row.when = " ".join(filter(None, [self._flag(text) for text in found if _is_flag(text)]))
            layers = [text for text in found if not _is_flag(text)]
            if layers:
                row.where = self._predicate(layers, "")
            return
        own = {text: value for text, value in literals.items() if not _is_flag(text)}
        found = next(conjunctions(~target, own), None)
        if found is None:
            row.optional = True
        else:
            row.where = self._predicate(list(found), "!")

    def _flag(self, text: str) -> str:
        kind, name, *value = text.removeprefix("!").split()
        flag = "_".join((name.replace(".", "_"), *value)).lower()
        self.flags[flag] = (kind, name, *value)  # type: ignore[assignment]
        return f"{'!' * text.startswith('!')}{flag}"

    def _predicate(self, terms: list[str], sign: str) -> str:
        if len(terms) == 1 and terms[0].startswith("!"):
            terms, sign = [terms[0][1:]], "" if sign else "!"
        text = " and ".join(f"not {term[1:]}" if term.startswith("!") else term for term in terms)
        for name, known in self.predicates.items():
            if known == text:
                return sign + name
        last = text.rpartition(" ")[2] if "[i]" in text and len(terms) == 1 else ""
        name = last if re.fullmatch(r"[a-z_]+", last) else f"layers_{len(self.predicates) + 1}"
        self.predicates[name] = text
        return sign + name


def _is_flag(text: str) -> bool:
    return text.removeprefix("!").startswith(("bool ", "given ", "size ", "equals "))


@dataclass(frozen=True)
class Defaults:
    """What a class says without samples: fields of the default config, names of its ends.

    `flat`: fields of the default config. `declared`: defaults in the classes by dotted name. `aliases`: field
    -> other names. `sections`: types of the sections. `head`, `embedding`: stored names of these weights.
    `section`: that of the text model. `outer`: whether the text model has its own table.
    """

    class_name: str
    flat: Mapping[str, Any]
    declared: Mapping[str, Any]
    aliases: Mapping[str, Sequence[str]]
    sections: Mapping[str, str]
    head: str | None
    embedding: str | None
    section: str = ""
    outer: bool = False


def padded(line: list[str]) -> list[str]:
    """Return the line of a row with all its parts."""
    return [*line, "", "", "", ""][:5]


class Entry:
    """Entry of the file of tables for one type."""

    def __init__(self, fitted: Fitted, defaults: Defaults) -> None:
        self.fitted = fitted
        self.defaults = defaults
        self.paths: dict[str, str] = {}  # path of a field -> name of its size
        self.experts: str | None = None
        self._name_sizes()
        self.rows = [self.row(row) for row in fitted.rows]

    def _name_sizes(self) -> None:
        self.name_of(self.fitted.count, "layers")
        self.experts = self._experts()
        self.name_of(f"{self.fitted.section}.vocab_size".removeprefix("."), "vocab")

    def name_of(self, path: str, known: str = "") -> str:
        """Return the name of a size by the path of its field."""
        if path not in self.paths:
            section, _, leaf = path.rpartition(".")
            name = known or leaf.lower()
            if not known and section == self.fitted.section:
                name = next((size for size, leaves in KNOWN.items() if leaf in leaves), name)
            if name in self.paths.values() or (not known and section != self.fitted.section):
                name = re.sub(r"\W", "_", path.lower())
            self.paths[path] = name
        return self.paths[path]

    def _experts(self) -> str | None:
        """Field with the number of experts; None without one."""
        counts = []
        for sample in self.fitted.samples:
            numbers = [
                numbers[1]
                for key, numbers in map(key_of, sample.shapes)
                if "{expert}" in self.fitted._row_name(key)
            ]
            counts.append(max(numbers, default=-1) + 1)
        stacked = not any(counts)
        for leaf in KNOWN["experts"]:
            path = f"{self.fitted.section}.{leaf}".removeprefix(".")
            values = [sample.flat.get(path) for sample in self.fitted.samples]
            fits = all(count in (0, value) for count, value in zip(counts, values, strict=True))
            if any(values) and (stacked or fits):
                self.name_of(path, "experts")
                return path
        return None

    def expression(self, text: str) -> str:
        """Return an expression of fields as one of sizes."""
        return re.sub(r"[A-Za-z_][\w.]*", lambda found: self._size(found[0]), text)

    def _size(self, path: str) -> str:
        return path if path == UNKNOWN else self.name_of(path)

    def row(self, row: Drawn) -> list[str]:
        """Return the line of a row."""
        shape, marks = row.shape, []
        parts = shape.split()
        if row.optional or self._is_outer(row) or ("{expert}" in row.name and self.experts is None):
            marks.append("optional")
        if row.key in self.fitted.transposed:
            marks = ["optional", "tensor"]
        elif len(parts) == 3 and parts[0] == self.experts:
            marks, shape = ["optional", "stack"], " ".join(parts[1:])
        elif len(parts) > 2 and ".experts" in row.name:
            marks, shape = ["optional"], UNKNOWN
        when = row.when
        if row.name in (self.defaults.head, self.defaults.embedding):
            when = ""  # the tie decides
        line = [row.name, self.expression(shape), row.where, when, " ".join(marks)]
        while not line[-1]:
            line.pop()
        return line

    def _is_outer(self, row: Drawn) -> bool:
        """Return whether a row is not of the text model: published towers have names of several versions."""
        if TOWER.search(row.name):
            return True
        base = self.fitted.list.rpartition(".")[0]
        ends = (self.defaults.head, self.defaults.embedding)
        return bool(self.fitted.section) and not row.name.startswith(f"{base}.") and row.name not in ends

    def data(self) -> dict[str, Any]:
        """Return the entry as data."""
        names = {line[0] for line in self.rows}
        ends = {}
        for end, name in (("head", self.defaults.head), ("embedding", self.defaults.embedding)):
            ends[end] = name if name in names else f"{end}.weight" if end == "embedding" else "lm_head.weight"
            if ends[end] not in names:
                self.rows.append([ends[end], f"{UNKNOWN} {UNKNOWN}", "", "", "optional"])
        flags = self._flags()
        self._name_sparse()
        places = {padded(line)[2].removeprefix("!") for line in self.rows} - {""}
        predicates = {name: self._predicate(self.fitted.predicates[name]) for name in sorted(places)}
        return {
            "class": self.defaults.class_name,
            "base": self.fitted.list.rpartition(".")[0],
            **{end: name.removesuffix(".weight") for end, name in ends.items()},
            "tied": bool(self.defaults.flat.get("tie_word_embeddings", False)),
            **({} if self._ties() else {"ties": False}),
            **({"sections": self.defaults.sections} if self.defaults.sections else {}),
            "sizes": self._sizes(),
            **({"flags": flags} if flags else {}),
            **({"predicates": predicates} if predicates else {}),
            "rows": self.rows,
        }

    def _flags(self) -> dict[str, Any]:
        used = {flag.removeprefix("!") for line in self.rows for flag in padded(line)[3].split()}
        return {name: self._flag(*self.fitted.flags[name]) for name in sorted(used)}

    def _sizes(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {}
        while len(sizes) < len(self.paths):  # an expression may name further sizes
            sizes |= {name: self._stored_size(path) for path, name in list(self.paths.items())}
        return sizes

    def _ties(self) -> bool:
        """Return whether the class drops the head of a tied model."""
        ties = {sample.flat.get("tie_word_embeddings") for sample in self.fitted.samples}
        head = next((row for row in self.fitted.rows if row.name == self.defaults.head), None)
        return head is None or head.optional or "tie_word_embeddings" in head.when or ties != {True, False}

    def _name_sparse(self) -> None:
        """Name the predicate of layers with experts."""
        predicates = self.fitted.predicates
        lines = [line for line in self.rows if "{expert}" in line[0] or "stack" in padded(line)[4]]
        places = {padded(line)[2] for line in lines if padded(line)[2]}
        if len(places) != 1 or not (place := places.pop()).removeprefix("!").startswith("layers_"):
            return
        old, new = place.removeprefix("!"), "dense" if place.startswith("!") else "sparse"
        predicates[new] = predicates[old]
        for line in self.rows:
            if len(line) > 2 and line[2].removeprefix("!") == old:
                line[2] = line[2].replace(old, new)

    def _predicate(self, text: str) -> str:
        def renamed(found: re.Match[str]) -> str:
            return found[0].replace(found[1], self.name_of(found[1]))

        text = re.sub(r"i < ([A-Za-z][\w.]*)", renamed, text)
        text = re.sub(r"([\w.]+) > \d", renamed, text)
        text = re.sub(r"\) % ([\w.]+) ==", renamed, text)
        text = re.sub(r"(i in [\w.]+)", r"\1 else unknown > 0", text)
        return re.sub(r"\) % \w+ == ([A-Za-z][\w.]*)", renamed, text)

    def _flag(self, kind: str, path: str, value: str = "") -> dict[str, Any]:
        default = self.defaults.flat.get(path)
        if kind == "size":
            return {"size": self.name_of(path)}
        if kind == "given":
            return {"key": path, "given": True, "default": default is not None}
        if kind == "equals":
            return {"key": path, "equals": value, "default": default == value}
        return {"key": path, "default": bool(default)}

    def _stored_size(self, path: str) -> list[Any]:
        """Return keys, default and value of a null.

        A number is no default: a published config may state it under a former name.
        """
        keys = [path, *self.defaults.aliases.get(path, ())]
        derived = path in self.defaults.declared and self.defaults.declared[path] is None
        section, leaf = path.removesuffix(path.rpartition(".")[2]), path.rpartition(".")[2]
        text = self.fitted.nulls.get(path)
        if follows := {"num_key_value_heads": ("heads",), "head_dim": ("hidden", "heads")}.get(leaf):
            found = [
                next((known for known in KNOWN[size] if f"{section}{known}" in self.paths), None)
                for size in follows
            ]
            if derived and None not in found:
                text = "/".join(f"{section}{known}" for known in found)
        null = text and self.expression(text)
        return [keys, null if derived else None, null]


class Towers(Entry):
    """Entry of the tensors around a text model that has its own table."""

    def _name_sizes(self) -> None:
        """Name no size beforehand."""

    def _is_outer(self, row: Drawn) -> bool:
        return True

    def name_of(self, path: str, known: str = "") -> str:
        """Return the whole path of a size as its name: the table of the text model has short ones."""
        return self.paths.setdefault(path, re.sub(r"\W", "_", path.lower()))

    def data(self) -> dict[str, Any]:
        """Return the entry as data."""
        flags = self._flags()
        return {
            "class": self.defaults.class_name,
            "text": self.defaults.section,
            "tied": bool(self.defaults.flat.get("tie_word_embeddings", False)),
            "sections": self.defaults.sections,
            "sizes": self._sizes(),
            **({"flags": flags} if flags else {}),
            "rows": self.rows,
        }
