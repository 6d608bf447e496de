"""Sizes, flags and kind of a model, from its config as hostile input: an implausible value counts as unknown.

Draft models for speculative decoding may share the embedding or head of their target model. EAGLE has one
decoder layer (`layers.0` without its first norm, or `midlayer`) and `fc`, a projection of the target's hidden
states. EAGLE-3 has a smaller vocabulary, with the maps `d2t` and `t2d`. An exported MTP layer keeps its layer
number, above those of the target. Sources: SafeAILab/EAGLE, vllm-project/speculators,
deepseek-ai/DeepSeek-V3.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qload.architecture.model_tables import TABLES, TEXT_TYPES, TIED_TYPES
from qload.architecture.table import Flag, Size, Table, evaluate_size
from qload.detect.files import shown

SIZE_LIMIT = 1 << 63  # a size beyond is not believed
INNER = ("text_config", "llm_config", "language_config")
TIE = "tie_word_embeddings"
CLASS_SUFFIXES = (
    "LM",
    "Model",
    "Generation",
    "Classification",
    "Answering",
)  # the ends of transformers' names
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def model_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """The type that a table knows, and the config of that very model: the whole, or that of its text."""
    own = config.get("model_type")
    if isinstance(own, str) and own in TABLES:
        return own, config
    for key in INNER:
        text = config.get(key)
        if isinstance(text, dict):
            kind = text.get("model_type", TEXT_TYPES.get(own) if isinstance(own, str) else None)
            return (kind, text) if isinstance(kind, str) and kind in TABLES else None
    return None


def read_sizes(table: Table, config: Mapping[str, Any]) -> tuple[Mapping[str, int | None], tuple[str, ...]]:
    """Each size of a table, None where it is not known, and a note on each value that is no size."""
    sizes: dict[str, int | None] = {}
    later: dict[str, str] = {}
    notes = []
    for name, size in table.sizes.items():
        said = _stated_size(size, config)
        if isinstance(said, str):
            later[name] = said
        elif said is None or (type(said) is int and 0 <= said < SIZE_LIMIT):
            sizes[name] = said
        else:
            sizes[name] = None
            key = next(key for key in size.keys if key in config)
            notes.append(
                f"config.json: {key} is {shown(said)}, and no size: what follows from it is not checked"
            )
    for name, text in later.items():
        sizes[name] = evaluate_size(text, sizes)
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
        evaluate_size = str(self.tied).lower()
        if self.key:
            return f"{self.key} is {evaluate_size}" + (f", and {self.denied} is not" if self.denied else "")
        return f"{TIE} is not in config.json, and {evaluate_size} by default for {self.kind}"


def tie_of(config: Mapping[str, Any]) -> Tie:
    """Find the tie in config.json: at its top, in its text model's section, or by default of the type."""
    model, outer = model_of(config), config.get("model_type")
    text = model[1] if model else _text_config(config)
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
    if model is not None and text is not config and isinstance(outer, str) and outer in TIED_TYPES:
        return Tie(True, kind=outer, outer=True)
    return Tie(TABLES[model[0]].tied, kind=model[0]) if model else Tie(None)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
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
        isinstance(name, str) and name.endswith(CLASS_SUFFIXES) and _letters(name).startswith(begin)
        for name in named
    )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _stated_size(size: Size, config: Mapping[str, Any]) -> Any:
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


# Words in the class names and model types of drafts, in any case.
DRAFT_WORDS = re.compile(r"eagle|medusa|hydra|mtp|nextn|speculat|draft", re.IGNORECASE)
DRAFT_KEYS = ("speculators_model_type", "draft_vocab_size")  # keys of config.json, only in drafts
# Name segments only in drafts, and prefixes only at the top level of a draft.
DRAFT_SEGMENTS = frozenset(("midlayer", "d2t", "t2d"))
DRAFT_PREFIXES = ("fc.", "model.fc.")
# Tensors only in MTP layers: two norms, and a projection of their joined outputs.
# Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md.
PREDICTING = frozenset(("eh_proj", "enorm", "hnorm"))
LAYER_PREFIX = re.compile(r"(.*?\b(?:layers|h)\.\d+)\.")


def is_draft(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a checkpoint is a draft without its target, by its config or its tensor names."""
    if isinstance(config.get("vision_config"), dict):  # a vision-language model, such as NVIDIA's Eagle
        return False
    classes = config.get("architectures")
    named = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    if any(key in config for key in DRAFT_KEYS) or any(
        isinstance(n, str) and DRAFT_WORDS.search(n) for n in named
    ):
        return True
    return _has_draft_names(names)


def _has_draft_names(names: Iterable[str]) -> bool:
    layers: dict[str, bool] = {}  # layer -> whether it is an MTP layer
    joined = False
    for name in names:
        parts = name.split(".")
        if not DRAFT_SEGMENTS.isdisjoint(parts):
            return True
        joined = joined or name.startswith(DRAFT_PREFIXES)
        layer = LAYER_PREFIX.match(name)
        if layer is not None:
            layers[layer[1]] = layers.get(layer[1], False) or not PREDICTING.isdisjoint(parts)
    return bool(layers) and (all(layers.values()) or (joined and len(layers) == 1))
