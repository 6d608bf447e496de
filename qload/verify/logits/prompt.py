"""The token ids that a model is compared on, and the one pass through it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qload.architecture import architecture_of
from qload.detect.files import MODEL_CONFIG, shown
from qload.errors import ArgumentError
from qload.models import FAMILIES, Decoder, PagedCache, Step, TextConfig, text_config
from qload.verify.prompt import Prompt

DRAWN = 24  # ids where nobody says which
SEED = 17
PAGE = 16  # tokens of a page of the cache


def config_of(config: Mapping[str, Any]) -> TextConfig:
    """What a `config.json` says of its text model; ArgumentError for a type that there is no model of."""
    known = architecture_of(config)
    if known is None or known.type not in FAMILIES:
        got = shown(config.get("model_type") if known is None else known.type)
        listed = f"a checkpoint of a type with a model: {', '.join(FAMILIES)}"
        raise ArgumentError(f"logits: model_type of {MODEL_CONFIG}", listed, got)
    return text_config(config)


def ids_of(prompt: Prompt, config: TextConfig) -> list[int]:
    """The ids of a prompt, each below `config.vocab`, not more than there are positions; or ArgumentError."""
    if prompt.ids is None:
        chance = torch.Generator().manual_seed(SEED)
        count = min(DRAWN, config.positions)
        return torch.randint(config.vocab, (count,), generator=chance).tolist()
    ids = list(prompt.ids)
    if not 1 <= len(ids) <= config.positions:
        raise ArgumentError("logits: ids", f"1 to {config.positions}, as there are positions", str(len(ids)))
    wrong = [each for each in ids if not 0 <= each < config.vocab]
    if wrong:
        raise ArgumentError("logits: ids", f"numbers of tokens, 0 to {config.vocab - 1}", str(wrong[0]))
    return ids


def logits_of(model: Decoder, ids: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """The logits (T, vocab) of T ids: all but the last in one step, and the last in one of its own.

    So that kernels for many tokens are asked and those for one.
    """
    pages = list(range(-(-len(ids) // PAGE)))
    cache = PagedCache.of(model.config, pages=len(pages), page_size=PAGE, dtype=dtype, device=device)
    words, found = torch.tensor(ids, device=device), []
    for start, stop in ((0, len(ids) - 1), (len(ids) - 1, len(ids))):
        if start < stop:
            step = Step.of([start], tokens=stop - start, pages=[pages], page_size=PAGE, device=device)
            found.append(model(words[start:stop], step, cache))
    return torch.cat(found)
