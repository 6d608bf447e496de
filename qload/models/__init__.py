"""Text and vision-language models over typed weights, for `qload run` and `qload verify --logits`.

    model = load_model(path, device="cuda")
    cache = PagedCache.of(model.config, pages=64, dtype=torch.bfloat16, device="cuda")
    logits = model(ids, Step.of([0], tokens=len(ids), pages=[[0, 1]], page_size=16, device="cuda"), cache)

`FAMILIES`: properties of each supported model type; `GREEDY`: sampler of the most likely token.
"""

from qload.models.attention import attend
from qload.models.config import LatentConfig, TextConfig, latent_config, text_config
from qload.models.decoder import Block, Decoder, load_decoder, load_model
from qload.models.families import FAMILIES
from qload.models.generation import GREEDY, Engine, Sampler, check_prompt
from qload.models.kv_cache import HeadSizes, PagedCache, Step
from qload.models.rope import Rope, RopeConfig, rotate_halves, rotate_pairs
from qload.models.stored_layers import Making
from qload.models.vision import VisionModel, load_vision_model

__all__ = [
    "FAMILIES",
    "GREEDY",
    "Block",
    "Decoder",
    "Engine",
    "HeadSizes",
    "LatentConfig",
    "Making",
    "PagedCache",
    "Rope",
    "RopeConfig",
    "Sampler",
    "Step",
    "TextConfig",
    "VisionModel",
    "attend",
    "check_prompt",
    "latent_config",
    "load_decoder",
    "load_model",
    "load_vision_model",
    "rotate_halves",
    "rotate_pairs",
    "text_config",
]
