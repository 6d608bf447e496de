"""Draft models for speculative decoding; they may share the embedding or head of their target model.

EAGLE has one decoder layer (`layers.0` without its first norm, or `midlayer`) and `fc`, a projection of the
target's hidden states. EAGLE-3 has a smaller vocabulary, with the maps `d2t` and `t2d`. An exported MTP layer
keeps its layer number, above those of the target. Sources: SafeAILab/EAGLE, vllm-project/speculators,
deepseek-ai/DeepSeek-V3.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Words in the class names and model types of drafts, in any case.
DRAFT = re.compile(r"eagle|medusa|hydra|mtp|nextn|speculat|draft", re.IGNORECASE)
KEYS = ("speculators_model_type", "draft_vocab_size")  # keys of config.json, only in drafts
# Name segments only in drafts, and prefixes only at the top level of a draft.
OWN = frozenset(("midlayer", "d2t", "t2d"))
JOINING = ("fc.", "model.fc.")
# Tensors only in MTP layers: two norms, and a projection of their joined outputs.
# Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md.
PREDICTING = frozenset(("eh_proj", "enorm", "hnorm"))
LAYER = re.compile(r"(.*?\b(?:layers|h)\.\d+)\.")


def is_draft(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether a checkpoint is a draft without its target, by its config or its tensor names."""
    if isinstance(config.get("vision_config"), dict):  # a vision-language model, such as NVIDIA's Eagle
        return False
    classes = config.get("architectures")
    named = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    if any(key in config for key in KEYS) or any(isinstance(n, str) and DRAFT.search(n) for n in named):
        return True
    return _has_names_of_draft(names)


def _has_names_of_draft(names: Iterable[str]) -> bool:
    layers: dict[str, bool] = {}  # layer -> whether it is an MTP layer
    joined = False
    for name in names:
        parts = name.split(".")
        if not OWN.isdisjoint(parts):
            return True
        joined = joined or name.startswith(JOINING)
        layer = LAYER.match(name)
        if layer is not None:
            layers[layer[1]] = layers.get(layer[1], False) or not PREDICTING.isdisjoint(parts)
    return bool(layers) and (all(layers.values()) or (joined and len(layers) == 1))
