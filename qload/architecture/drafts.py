"""Draft models: heads that predict further words for another model, whose embedding or head they may borrow.

EAGLE holds one decoder layer (`layers.0` without its first norm, or `midlayer`) and `fc`, which joins the
hidden states of the model. EAGLE-3 has a smaller vocabulary, with the maps `d2t` and `t2d`. An exported MTP
layer keeps its number, beyond those of the model. Sources: SafeAILab/EAGLE, vllm-project/speculators,
deepseek-ai/DeepSeek-V3.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Words of the classes and types of drafts, in any case.
DRAFT = re.compile(r"eagle|medusa|hydra|mtp|nextn|speculat|draft", re.IGNORECASE)
KEYS = ("speculators_model_type", "draft_vocab_size")  # of config.json, which no other model has
# Segments of names that only drafts have; and what stands at the top of one alone.
OWN = frozenset(("midlayer", "d2t", "t2d"))
JOINING = ("fc.", "model.fc.")
# What a layer that predicts further words has, and no other: two norms and the matrix that joins them.
# Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md.
PREDICTING = frozenset(("eh_proj", "enorm", "hnorm"))
LAYER = re.compile(r"(.*?\b(?:layers|h)\.\d+)\.")


def is_draft(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint is a draft alone, by its config or by the names of its tensors."""
    if isinstance(config.get("vision_config"), dict):  # of a model that sees, as NVIDIA's Eagle
        return False
    classes = config.get("architectures")
    named = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    if any(key in config for key in KEYS) or any(isinstance(n, str) and DRAFT.search(n) for n in named):
        return True
    return _has_names_of_draft(names)


def _has_names_of_draft(names: Iterable[str]) -> bool:
    layers: dict[str, bool] = {}  # whether it predicts further words
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
