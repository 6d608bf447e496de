"""Draft models for speculative decoding: their kind, and the facts of their config about the target model.

| kind | tensors |
|---|---|
| EAGLE (1 and 2) | one decoder layer without its first norm; `fc` joins embedding and last hidden state |
| EAGLE-3 | `midlayer` or `layers.0`; `fc` joins hidden states of some layers; maps `d2t` and `t2d` |
| DFlash | decoder layers; `fc` joins hidden states of some layers |
| MTP | one decoder layer; `eh_proj` or `fc` joins embedding and last hidden state |
| Medusa | heads for the last hidden state: residual blocks, and one matrix of outputs each |
| MLP speculator | `emb`, `proj`, `ln` and `head` of each predicted token |

A draft may borrow the embedding and the head of its target. `d2t[i]` is an offset: the draft's id i is the
target's id i + d2t[i]; `t2d` is True for the target's ids in the draft's vocabulary. An exported MTP layer
keeps its number, above those of the target, or is layer 0. Sources: SafeAILab/EAGLE (cnets.py),
vllm-project/speculators (config.py of each model), vllm-project/vllm (llama_eagle3.py, medusa.py),
sgl-project/sglang (llama_eagle3.py), FasterDecoding/Medusa (medusa_model.py), deepseek-ai/DeepSeek-V3.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Kind = Literal["EAGLE", "EAGLE-3", "DFlash", "MTP", "Medusa", "Hydra", "MLP speculator", "draft"]

# Words in the class names and model types of drafts, in any case, the more specific ones first.
WORDS: tuple[tuple[Kind, str], ...] = (
    ("EAGLE-3", r"p?eagle[-_]?3|peagle"),
    ("DFlash", r"dflash|dspark"),
    ("MLP speculator", r"mlp_?speculator"),
    ("Medusa", r"medusa"),
    ("Hydra", r"hydra"),
    ("MTP", r"mtp|nextn"),
    ("EAGLE", r"eagle"),
    ("draft", r"speculat|draft"),
)
# Keys of config.json, only in drafts.
SPECULATORS_TYPE = "speculators_model_type"
KEYS: tuple[tuple[Kind, str], ...] = (
    ("DFlash", "dflash_config"),
    ("EAGLE-3", "draft_vocab_size"),
    ("draft", SPECULATORS_TYPE),
)
# Sections with the facts of a draft: of speculators, NVIDIA's EAGLE-3, DFlash, and vLLM's EAGLE.
SECTIONS = ("transformer_layer_config", "eagle_config", "dflash_config", "text_config", "model")
# Name segments only in EAGLE-3, and prefixes only at the top level of a draft.
EAGLE3_SEGMENTS = frozenset(("midlayer", "d2t", "t2d"))
JOINING_PREFIXES = ("fc.", "model.fc.")
MTP_PREFIX = "mtp."
# Tensors only in MTP layers: two norms, and a projection of their joined outputs.
# Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md.
PREDICTING = frozenset(("eh_proj", "enorm", "hnorm"))
LAYER_PREFIX = re.compile(r"(.*?\b(?:layers|h)\.(\d{1,9}))\.")
# Last segments of projections of joined vectors.
JOINING = ("fc", "eh_proj", "fusion_fc")
# A matrix of a Medusa head: of a residual block, or of the outputs.
MEDUSA = re.compile(
    r"(?:medusa_heads?\.)?(?:"
    r"blocks\.(?P<block>\d{1,9})\.layers\.\d+"
    r"|lm_heads\.(?P<output>\d{1,9})"
    r"|(?P<head>\d{1,9})\.(?:(?P<residual>(?:medusa_layers\.)?\d+\.linear)|\d+|lm_head))"
)
MEDUSA_ALONE = ("token_map", "lm_head.weight")  # tensors outside of the heads
# Keys with the layers whose hidden states a draft joins, and the first and last number for N layers of the
# target, as N - last. vLLM counts a hidden state by the layers before it, DFlash by its layer.
TAPS = (
    ("eagle_aux_hidden_state_layer_ids", 0, 0),
    ("aux_hidden_state_layer_ids", 0, 0),
    ("target_layer_ids", -1, 1),
)
TAPPING: tuple[Kind, ...] = ("EAGLE-3", "DFlash")  # kinds that join hidden states of several layers
EAGLE3_TAPS = 3  # hidden states without a list of layers
MAX_SIZE = 1 << 63  # larger sizes are implausible


@dataclass(frozen=True)
class Taps:
    """Layers of the target whose hidden states a draft joins, with their key and the lawful numbers."""

    key: str
    layers: tuple[int, ...]
    first: int
    reserve: int

    def last(self, count: int) -> int:
        """Return the last lawful number for a target of `count` layers."""
        return count - self.reserve


@dataclass(frozen=True)
class Draft:
    """A draft model: its kind, and the facts in its config.

    Attributes
    ----------
    kind
        EAGLE, EAGLE-3, DFlash, MTP, Medusa, Hydra, MLP speculator; "draft" if unknown.
    config
        Its config.json. The config is hostile: an implausible value counts as missing.
    """

    kind: Kind
    config: Mapping[str, Any] = field(repr=False)

    def size(self, *keys: str) -> tuple[str, int] | None:
        """Return the first of the keys with a size, at the top of the config or in a section."""
        return next(
            (
                (name, value)
                for name, value in self._values(*keys)
                if type(value) is int and 0 < value < MAX_SIZE
            ),
            None,
        )

    def number(self, *keys: str) -> int | None:
        """Return the size of the first of the keys."""
        size = self.size(*keys)
        return size and size[1]

    @cached_property
    def taps(self) -> Taps | None:
        """Tapped layers of the target; None without a list of them."""
        for key, first, reserve in TAPS:
            for name, value in self._values(key):
                if isinstance(value, list) and value and all(type(layer) is int for layer in value):
                    return Taps(name, tuple(value), first, reserve)
        return None

    @property
    def joined(self) -> int | None:
        """Number of vectors that the projection joins; None if unknown."""
        if self.kind in ("EAGLE", "MTP"):
            return 2  # embedding and hidden state
        if self.kind == "DFlash":
            return len(self.taps.layers) if self.taps else None
        if self.kind != "EAGLE-3" or any(value is False for _, value in self._values("use_aux_hidden_state")):
            return None
        return len(self.taps.layers) if self.taps else EAGLE3_TAPS

    @property
    def target(self) -> tuple[str, str] | None:
        """Key and name of the target in the config; None without one."""
        speculators = self.config.get("speculators_config")
        verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
        places = (
            ("speculators_config.verifier.name_or_path", verifier, "name_or_path"),
            ("base_model_name_or_path", self.config, "base_model_name_or_path"),
        )
        for key, section, last in places:
            name = section.get(last) if isinstance(section, Mapping) else None
            if isinstance(name, str) and name:
                return key, name
        return None

    def _values(self, *keys: str) -> Iterator[tuple[str, Any]]:
        """Yield the values of the keys, with the section in the name."""
        for key in keys:
            if key in self.config:
                yield key, self.config[key]
            for section in SECTIONS:
                inner = self.config.get(section)
                if isinstance(inner, dict) and key in inner:
                    yield f"{section}.{key}", inner[key]


def draft_of(config: Mapping[str, Any], names: Collection[str]) -> Draft | None:
    """Return the draft in a checkpoint without its target, by its config or its tensor names; None without.

    `names`: names of all tensors.
    """
    if isinstance(config.get("vision_config"), dict):  # a vision-language model, such as NVIDIA's Eagle
        return None
    kind = _kind_by_config(config)
    if kind in (None, "EAGLE", "draft"):  # classes of EAGLE-3 may be named like those of EAGLE
        kind = _kind_by_names(config, names) or kind
    return None if kind is None else Draft(kind, config)


def medusa_head(prefix: str) -> tuple[int, bool] | None:
    """Number of a Medusa head, and whether the matrix `prefix` is its output; None for another matrix."""
    match = MEDUSA.fullmatch(prefix)
    if match is None:
        return None
    number = next(match[name] for name in ("block", "output", "head") if match[name])
    return int(number), not (match["block"] or match["residual"])


def _kind_by_config(config: Mapping[str, Any]) -> Kind | None:
    classes = config.get("architectures")
    texts = [
        config.get(SPECULATORS_TYPE),
        config.get("model_type"),
        *(classes if isinstance(classes, list) else ()),
    ]
    for kind, words in WORDS:
        if any(isinstance(text, str) and re.search(words, text, re.IGNORECASE) for text in texts):
            return kind
    return next((kind for kind, key in KEYS if key in config), None)


def _kind_by_names(config: Mapping[str, Any], names: Collection[str]) -> Kind | None:
    layers: dict[str, bool] = {}  # layer -> whether it is an MTP layer
    joins = has_second_norm = False
    for name in names:
        parts = name.split(".")
        if not EAGLE3_SEGMENTS.isdisjoint(parts):
            return "EAGLE-3"
        joins = joins or name.startswith(JOINING_PREFIXES)
        has_second_norm = has_second_norm or "hidden_norm" in parts
        layer = LAYER_PREFIX.match(name)
        if layer is not None:
            layers[layer[1]] = layers.get(layer[1], False) or not PREDICTING.isdisjoint(parts)
    if (layers and all(layers.values())) or (names and all(name.startswith(MTP_PREFIX) for name in names)):
        return "MTP"
    if joins and len(layers) == 1:
        return "EAGLE-3" if has_second_norm else "EAGLE"
    return "Medusa" if _has_medusa_names(config, names) else None


def _has_medusa_names(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether all matrices are of Medusa heads, and a word or a key says so."""
    prefixes = {name.rpartition(".")[0] for name in names if name not in MEDUSA_ALONE}
    named = "medusa_num_heads" in config or any(prefix.startswith("medusa_head") for prefix in prefixes)
    return named and bool(prefixes) and all(map(MEDUSA.fullmatch, prefixes))
