"""What a model's config says of sizes and flags, as hostile input: what cannot be believed is not known."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qload.architecture.expressions import value
from qload.architecture.table import Flag, Size, Table
from qload.architecture.tables import TABLES, TEXT_OF, TIED_AROUND
from qload.detect.files import shown

LARGEST = 1 << 63  # a size beyond is not believed
INNER = ("text_config", "llm_config", "language_config")
TIE = "tie_word_embeddings"
CLASSES = ("LM", "Model", "Generation", "Classification", "Answering")  # the ends of transformers' names
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def model_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The type that a table knows, and the config of that very model: the whole, or that of its text."""
    own = config.get("model_type")
    if isinstance(own, str) and own in TABLES:
        return own, config
    for key in INNER:
        text = config.get(key)
        if isinstance(text, dict):
            kind = text.get("model_type", TEXT_OF.get(own) if isinstance(own, str) else None)
            return (kind, text) if isinstance(kind, str) and kind in TABLES else None
    return None


def read_sizes(table: Table, config: Mapping[str, Any]) -> tuple[Mapping[str, int | None], tuple[str, ...]]:
    """Each size of a table, None where it is not known, and a note on each value that is no size."""
    sizes: dict[str, int | None] = {}
    later: dict[str, str] = {}
    notes = []
    for name, size in table.sizes.items():
        said = _said(size, config)
        if isinstance(said, str):
            later[name] = said
        elif said is None or (type(said) is int and 0 <= said < LARGEST):
            sizes[name] = said
        else:
            sizes[name] = None
            key = next(key for key in size.keys if key in config)
            notes.append(
                f"config.json: {key} is {shown(said)}, and no size: what follows from it is not checked"
            )
    for name, text in later.items():
        sizes[name] = value(text, sizes)
    return sizes, tuple(notes)


def read_flag(flag: Flag, config: Mapping[str, Any], sizes: Mapping[str, int | None]) -> bool | None:
    """Whether a flag is set; None where that is not known."""
    if flag.size:
        size = sizes[flag.size]
        return None if size is None else size > 0
    said = config.get(flag.key, flag.default)
    return said if isinstance(said, bool) else None


def read_list(config: Mapping[str, Any], key: str) -> frozenset[int] | Literal[False] | None:
    """The numbers of a list of layers; None where there is none, False for what is no such list."""
    listed = config.get(key)
    if listed is None:
        return None
    return isinstance(listed, list) and all(type(layer) is int for layer in listed) and frozenset(listed)


@dataclass(frozen=True, slots=True)
class Tie:
    """Tie of head and embedding (None: not known), and its source.

    `key`: of config.json; "" for the default of the type `kind`. `denied`: a key with the opposite value,
    read by some programs. `outer`: True for a default of the model around the text model: transformers uses
    it, but a program for the text model alone does not.
    """

    tied: bool | None
    key: str = ""
    kind: str = ""
    denied: str = ""
    outer: bool = False

    def __str__(self) -> str:
        value = str(self.tied).lower()
        if self.key:
            return f"{self.key} is {value}" + (f", and {self.denied} is not" if self.denied else "")
        return f"{TIE} is not in config.json, and {value} by default for {self.kind}"


def tie_of(config: Mapping[str, Any]) -> Tie:
    """Find the tie in config.json: at its top, in its text model's section, or by default of the type."""
    model, outer = model_of(config), config.get("model_type")
    text = model[1] if model else _text_of(config)
    places = {TIE: config}
    if text is not None and text is not config:
        places[f"{next(key for key in INNER if config.get(key) is text)}.{TIE}"] = text
    known = {key: place[TIE] for key, place in places.items() if isinstance(place.get(TIE), bool)}
    if known:
        tied = any(known.values())
        return Tie(
            tied,
            next(key for key in known if known[key] is tied),
            denied=next((key for key in known if known[key] is not tied), ""),
        )
    if model is not None and text is not config and isinstance(outer, str) and outer in TIED_AROUND:
        return Tie(True, kind=outer, outer=True)
    return Tie(TABLES[model[0]].tied, kind=model[0]) if model else Tie(None)


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((config[key] for key in INNER if isinstance(config.get(key), dict)), None)


def has_head(config: Mapping[str, Any]) -> bool:
    """Whether the model predicts words: what `architectures` names, and any model where it names none."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named:
        return True
    return any(isinstance(name, str) and name.endswith(CAUSAL) for name in named)


def is_usual_class(config: Mapping[str, Any]) -> bool:
    """Whether `architectures` names a class that models of this type have, or none; a draft for another
    model (`LlamaForCausalLMEagle`, `EagleLlamaForCausalLM`) leaves out what it takes from that model."""
    named, kind = config.get("architectures"), config.get("model_type")
    if not isinstance(named, list) or not named or not isinstance(kind, str):
        return True
    begin = _letters(kind.removesuffix("_text"))
    return any(
        isinstance(name, str) and name.endswith(CLASSES) and _letters(name).startswith(begin)
        for name in named
    )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _said(size: Size, config: Mapping[str, Any]) -> Any:
    """A size as the config has it, or the default as a number or an expression.

    A text that the config has is wrapped, so that it is not taken for an expression.
    """
    for key in size.keys:
        if key in config:
            said = config[key]
            if said is None:
                return size.null
            return [said] if isinstance(said, str) else said
    return size.default
