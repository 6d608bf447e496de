"""Random models as checkpoints, the logits of what their codes mean, and those that vLLM's classes give."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

from tests.engines.vllm import ranks, running  # first, as vLLM looks for its platform when it is imported
from tests.models import drawn
from tests.models.recorded import off
from tests.models.with_transformers import formats, theirs
from tests.models.with_transformers.asked import IDS
from tests.models.with_transformers.formats import RANGE

__all__ = ["RANGE", "answers", "built", "changed", "off"]

ROPE = {"rope_type": "default", "rope_theta": 1e4}
SAID: dict[str, dict[str, Any]] = {  # what vLLM and transformers mean alike
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "mixtral": {"sliding_window": None, "num_hidden_layers": 1},
    "qwen3_moe": {
        "use_sliding_window": False,
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
    "deepseek_v2": {"attention_bias": False, "first_k_dense_replace": 1, "rms_norm_eps": 1e-6},
}


def built(kind: str, name: str, folder: Path, **said: Any) -> tuple[Path, Tensor]:
    """A checkpoint, and the logits of what its codes mean."""
    return changed(kind, name, folder, {}, **said)


def changed(
    kind: str,
    name: str,
    folder: Path,
    layers: Mapping[str, Callable[[int, int, Generator], Mapping[str, Tensor]] | None],
    section: Mapping[str, Any] | None = None,
    **said: Any,
) -> tuple[Path, Tensor]:
    """The same, of which the `layers` are stored as these make them; None: plain, as they were quantized.

    `section`: what its config says of that beside the rest.
    """
    made = formats.built(kind, name, folder, **{"rope_parameters": ROPE, **SAID[kind], **said})
    means = load_file(made.means / "model.safetensors")
    tensors, make = dict(made.tensors), Generator().manual_seed(7)
    config = {**made.config, "quantization_config": {**made.config["quantization_config"], **(section or {})}}
    for prefix, of in layers.items():
        for held in [each for each in tensors if each.startswith(f"{prefix}.") and each != f"{prefix}.bias"]:
            del tensors[held]
        plain = means[f"{prefix}.weight"]
        fields = {"weight": plain} if of is None else of(*plain.shape, make)
        tensors |= {f"{prefix}.{suffix}": tensor for suffix, tensor in fields.items()}
    held_weights = drawn.weights(config, tensors)
    means |= {f"{prefix}.weight": held_weights.get_weights(prefix).dequantize() for prefix in layers}
    save_file(
        {key: each.contiguous() for key, each in means.items()},
        made.means / "model.safetensors",
        {"format": "pt"},
    )
    return running.saved(folder / "stored", config, tensors), theirs.logits(made.means, IDS)


def answer(folder: Path, world: int, **said: Any) -> Tensor | None:
    """The logits, where all are gathered."""
    config = running.config_of(folder, world, activations="unquantized", **said)
    return running.logits(running.loaded(config), config, IDS)


def answers(world: int, folder: Path, **said: Any) -> list[Tensor]:
    """Those of every rank."""
    found = ranks.run(world, lambda: answer(folder, world, **said))
    assert not [each for each in found if isinstance(each, str)], found
    return found


def refused(world: int, folder: Path, error: str, **said: Any) -> str:
    """The one line with which an error of this name ends every rank."""
    found = ranks.run(world, lambda: answer(folder, world, **said))
    lines = [next((line for line in str(each).splitlines() if f"{error}:" in line), each) for each in found]
    assert all(isinstance(line, str) for line in lines), "nothing refused it"
    assert len(set(lines)) == 1, lines
    return str(lines[0])


def same(found: list[Tensor], want: Tensor) -> bool:
    """Whether all ranks have the same bits, which are the logits."""
    first, *others = found
    return off(first, want) < RANGE and all(torch.equal(first, other) for other in others)
