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
from qload.configs import value_text

SIZE_LIMIT = 1 << 63  # larger sizes are implausible
INNER = ("text_config", "llm_config", "language_config")
TIE = "tie_word_embeddings"
# Last words of transformers' class names.
CLASS_SUFFIXES = ("LM", "Model", "Generation", "Classification", "Answering")
CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def model_of(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Model type with a table, and its config: the whole config, or the section of the text model."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in TABLES:
        return model_type, config
    for key in INNER:
        text = config.get(key)
        if isinstance(text, dict):
            text_type = text.get(
                "model_type", TEXT_TYPES.get(model_type) if isinstance(model_type, str) else None
            )
            return (text_type, text) if isinstance(text_type, str) and text_type in TABLES else None
    return None


def read_sizes(table: Table, config: Mapping[str, Any]) -> tuple[Mapping[str, int | None], tuple[str, ...]]:
    """Read the sizes of a table, None if unknown, with a note on each value that is not a size."""
    sizes: dict[str, int | None] = {}
    expressions: dict[str, str] = {}
    notes = []
    for name, size in table.sizes.items():
        value = _stated_size(size, config)
        if isinstance(value, str):
            expressions[name] = value
        elif value is None or (type(value) is int and 0 <= value < SIZE_LIMIT):
            sizes[name] = value
        else:
            sizes[name] = None
            key = next(key for key in size.keys if key in config)
            notes.append(
                f"config.json: {key} is {value_text(value)}, not a size: dependent shapes are not checked"
            )
    for name, text in expressions.items():
        sizes[name] = evaluate_size(text, sizes)
    return sizes, tuple(notes)


def read_flag(flag: Flag, config: Mapping[str, Any], sizes: Mapping[str, int | None]) -> bool | None:
    """Read a flag; None if unknown."""
    if flag.size:
        size = sizes[flag.size]
        return None if size is None else size > 0
    value = config.get(flag.key, flag.default)
    return value if isinstance(value, bool) else None


def read_list(config: Mapping[str, Any], key: str) -> frozenset[int] | Literal[False] | None:
    """Read a list of layer numbers; None without one, False for another value."""
    listed = config.get(key)
    if listed is None:
        return None
    return isinstance(listed, list) and all(type(layer) is int for layer in listed) and frozenset(listed)


@dataclass(frozen=True, slots=True)
class Tie:
    """Tie of head and embedding (None: unknown), and its source.

    Attributes
    ----------
    tied
        Whether they are tied.
    key
        Key of config.json; "" for the default of the type `kind`.
    kind
        Model type of the default.
    denied
        A key with the opposite value, read by some programs.
    outer
        True for a default of the model around the text model: transformers uses it, but a program for the
        text model alone does not.
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
    """Find the tie in config.json: at the top level, in the text section, or by the type's default."""
    model, outer = model_of(config), config.get("model_type")
    text = (
        model[1] if model else next((config[key] for key in INNER if isinstance(config.get(key), dict)), None)
    )
    sections = {TIE: config}
    if text is not None and text is not config:
        sections[f"{next(key for key in INNER if config.get(key) is text)}.{TIE}"] = text
    values = {key: section[TIE] for key, section in sections.items() if isinstance(section.get(TIE), bool)}
    if values:
        tied = any(values.values())
        key = next(key for key in values if values[key] is tied)
        return Tie(tied, key, denied=next((key for key in values if values[key] is not tied), ""))
    if model is not None and text is not config and isinstance(outer, str) and outer in TIED_TYPES:
        return Tie(True, kind=outer, outer=True)
    return Tie(TABLES[model[0]].tied, kind=model[0]) if model else Tie(None)


def has_head(config: Mapping[str, Any]) -> bool:
    """Return whether the model has a language model head, by `architectures`; True without class names."""
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        return True
    return any(isinstance(name, str) and name.endswith(CAUSAL) for name in classes)


def is_usual_class(config: Mapping[str, Any]) -> bool:
    """Return whether `architectures` names a usual class of the model type, or no class.

    A draft (`LlamaForCausalLMEagle`, `EagleLlamaForCausalLM`) shares tensors with its target, and lacks them.
    """
    classes, model_type = config.get("architectures"), config.get("model_type")
    if not isinstance(classes, list) or not classes or not isinstance(model_type, str):
        return True
    prefix = _letters(model_type.removesuffix("_text"))
    return any(
        isinstance(name, str) and name.endswith(CLASS_SUFFIXES) and _letters(name).startswith(prefix)
        for name in classes
    )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def _stated_size(size: Size, config: Mapping[str, Any]) -> Any:
    """Size in the config, or the default: a number or an expression.

    A text in the config is wrapped in a list, to tell it from an expression.
    """
    for key in size.keys:
        if key in config:
            value = config[key]
            if value is None:
                return size.null
            return [value] if isinstance(value, str) else value
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
    kinds = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    if any(key in config for key in DRAFT_KEYS):
        return True
    if any(isinstance(name, str) and DRAFT_WORDS.search(name) for name in kinds):
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
