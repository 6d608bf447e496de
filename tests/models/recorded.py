"""A model of another tool and the logits that were recorded with the weights that the tool says it means."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qload import UnquantizedWeight
from qload.experts import ExpertsWeight, Stack
from qload.experts.weight import stacked
from qload.models import Decoder, PagedCache, Step, load_model
from qload.parallel import ALONE, ProcessGroup
from qload.spec import Weight

PAGE = 8
HALVES = (torch.bfloat16, torch.float16)
OWN = "EXPECTED.safetensors"


def plain(weight: Weight, rounded: torch.dtype) -> UnquantizedWeight:
    """What a weight means, rounded to a dtype as a tool does that dequantizes to it; inputs as they come."""
    means = weight.dequantize(rounded).float()
    return UnquantizedWeight(weight=means, layer=replace(weight.layer, activations=None, origin=None))


@dataclass(frozen=True)
class Rounded:
    """What makes layers of weights that are rounded once, and multiplies in float32."""

    dtype: torch.dtype

    @classmethod
    def of(cls, folder: Path) -> "Rounded":
        """As the owner of a fixture rounded, whose record says it."""
        return cls(getattr(torch, tomllib.loads((folder / "ORIGIN.toml").read_text())["rounded"]))

    def linear(self, weight: Weight, bias: Tensor | None, maximum: Any) -> nn.Module:
        module: nn.Module = plain(weight, self.dtype).get_linear(None if bias is None else bias.float())
        return module

    def experts(self, weight: ExpertsWeight, maximum: Any) -> nn.Module:
        def rounded(stack: Stack) -> Stack:
            own = [plain(stack.expert(place), self.dtype) for place in range(len(stack))]
            return stacked(stack.layer.name, len(stack), own)

        made = replace(weight, gate_up=rounded(weight.gate_up), down=rounded(weight.down))
        return made.get_linear()

    def load(self, folder: Any, group: ProcessGroup = ALONE, **options: Any) -> Decoder:
        """The model of a folder or of `Weights`, in float32."""
        makers = {"make": self.linear, "make_experts": self.experts}
        return load_model(folder, dtype=torch.float32, process_group=group, **makers, **options)


def logits(model: Decoder, ids: Tensor, ranks: int = 1, chunks: int = 1) -> Tensor:
    """The logits (S, Q, vocab) of sequences `ids` (S, Q), in as many passes as `chunks`."""
    S, Q = ids.shape
    count = -(-Q // PAGE)
    pages = [list(range(n, S * count, S)) for n in range(S)]  # of no sequence next to each other
    cache = PagedCache.of(model.config, pages=S * count, page_size=PAGE, ranks=ranks, dtype=torch.float32)
    made, start = [], 0
    for chunk in ids.long().chunk(chunks, dim=1):
        step = Step.of([start] * S, tokens=chunk.shape[1], pages=pages, page_size=PAGE)
        made.append(model(chunk.flatten(), step, cache).view(S, chunk.shape[1], -1))
        start += chunk.shape[1]
    return torch.cat(made, dim=1)


def recorded(folder: Path) -> tuple[Tensor, Tensor]:
    """The ids (S, Q) and the logits (S, Q, vocab) of a folder."""
    held = load_file(
        folder / OWN if (folder / OWN).exists() else folder / "expected" / "expected.safetensors"
    )
    return held["input_ids"], held["logits_fp32"].view(*held["input_ids"].shape, -1)


def owners_dtype(folder: Path) -> torch.dtype:
    """What a folder's owner rounded its dequantized weights to: the narrowest type that holds them all."""
    held = load_file(folder / OWN)
    means = [tensor.float() for name, tensor in held.items() if name.startswith("dequant")]
    fits = (dtype for dtype in HALVES if means and all(torch.equal(w.to(dtype).float(), w) for w in means))
    return next(fits, torch.float32)


def off(got: Tensor, want: Tensor) -> float:
    """The largest difference, in ranges of what is wanted; NaN stays NaN."""
    return float((got - want).abs().max() / (want.max() - want.min()))
