"""Model of a checkpoint with kernels and exact products in each layer; its token ids and forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from qload.checkpoint import Checkpoint, target_of_dtype
from qload.configs import value_text
from qload.detect import for_target
from qload.detect.config_reader import MODEL_CONFIG
from qload.engines.model_types import ModelSizes, sizes_of_any_type
from qload.errors import ArgumentError, CastError, ConfigError, MismatchError, RepackError
from qload.experts.weight import stacked
from qload.kernels.declared import Maximum
from qload.kernels.dtypes import DTYPES
from qload.methods import ParallelExperts
from qload.methods.layers import LinearBase
from qload.models import (
    Decoder,
    PagedCache,
    Step,
    TextConfig,
    VisionModel,
    load_model,
    load_vision_model,
)
from qload.models.images import ImageProcessor, check_image_tokens
from qload.models.memory import check_memory, free_bytes, stored_bytes
from qload.models.vision_config import TYPES, VisionConfig, vision_config
from qload.repacking import RepackingLoader
from qload.spec import Weight
from qload.verify.logits.compared_layers import ComparedExperts, ComparedLinear, CompareState
from qload.verify.report import Prompt
from qload.weights import Weights

DEFAULT_TOKENS = 24  # random ids of a prompt without ids
SEED = 17
PAGE_TOKENS = 16  # of a page of the cache
RANDOM_PATCHES = (8, 6)  # rows and columns of an image of random pixels, at most


@dataclass(frozen=True)
class ModelPrompt:
    """Token ids of a prompt, and the images of its image tokens.

    Attributes
    ----------
    config, vision
        Config or sizes of the text model, and config of the vision parts, None for a prompt without images.
    ids
        Token ids.
    images
        Pixels and their mask, as in `VisionModel.images`; () for a prompt without images.
    """

    config: TextConfig | ModelSizes
    vision: VisionConfig | None
    ids: list[int]
    images: tuple[Tensor, ...]

    @classmethod
    def of(cls, prompt: Prompt, place: str | PathLike[str], model_config: Mapping[str, Any]) -> "ModelPrompt":
        """Read a prompt for the checkpoint at `place`; ArgumentError for invalid ids or images."""
        config = read_sizes(place, model_config)
        vision, ids = read_vision_config(model_config, config), prompt.ids
        if vision is None:
            if prompt.images:
                listed = f"a checkpoint of a type with vision for images: {', '.join(TYPES)}"
                got = value_text(model_config.get("model_type"))
                raise ArgumentError(f"logits: model_type of {MODEL_CONFIG}", listed, got)
            return cls(config, None, token_ids(ids, config), ())
        images: tuple[Tensor, ...] = ()
        if prompt.images:
            images = ImageProcessor.of(place).load(prompt.images)
        latents, token = vision.resampler.latents, vision.image_token
        if ids is None:
            tokens = [token] * latents * (len(images[0]) if images else 1)
            words = random_ids(config, config.positions - len(tokens))
            ids = [*tokens, *(word for word in words if word != token)]
        ids = token_ids(ids, config)
        if not images and token in ids:
            images = random_images(vision, -(-ids.count(token) // latents))
        check_image_tokens(ids, vision, len(images[0]) if images else 0)
        return cls(config, vision if images else None, ids, images)


@dataclass(frozen=True)
class ComparedModel(ABC):
    """A model, and the state of its layers.

    Attributes
    ----------
    model
        Whole model.
    state
        State of its layers.
    dtype
        Dtype of its activations.
    """

    model: Any
    state: CompareState
    dtype: torch.dtype

    @property
    def text(self) -> nn.Module:
        """Text model."""
        model: nn.Module = self.model
        return model

    @abstractmethod
    def layer_paths(self) -> Iterator[str]:
        """Yield the paths of the modules whose outputs a reference is compared with."""

    @abstractmethod
    def compute_logits(self, prompt: ModelPrompt) -> Tensor:
        """Compute the logits (T, vocab) of T ids, with kernels for many tokens and for one."""


class ComparedDecoder(ComparedModel):
    """Model of qload: a text model, or a model with vision for a prompt with images."""

    @property
    def text(self) -> Decoder:
        """Text model."""
        text: Decoder = self.model.text if isinstance(self.model, VisionModel) else self.model
        return text

    def layer_paths(self) -> Iterator[str]:
        """Yield the paths of all linear layers and experts."""
        for path, module in self.model.named_modules():
            if isinstance(module, LinearBase | ParallelExperts):
                yield path

    def compute_logits(self, prompt: ModelPrompt) -> Tensor:
        """Compute the logits of all ids but the last in one step, and of the last in another."""
        count, text = len(prompt.ids), self.text
        device = text.embed_tokens.get_buffer("weight").device
        pages = list(range(-(-count // PAGE_TOKENS)))
        sizes: dict[str, Any] = {"pages": len(pages), "page_size": PAGE_TOKENS, "dtype": self.dtype}
        cache = PagedCache.of(text.config, **sizes, device=device)
        ids, logits = torch.tensor(prompt.ids, device=device), []
        if isinstance(self.model, VisionModel):
            x = self.model.embed(ids, self.model.images(*(tensor.to(device) for tensor in prompt.images)))
        else:
            x = text.embed(ids)
        for start, stop in ((0, count - 1), (count - 1, count)):
            if start < stop:
                options: dict[str, Any] = {"pages": [pages], "page_size": PAGE_TOKENS, "device": device}
                step = Step.of([start], tokens=stop - start, **options)
                logits.append(text.logits(text.hidden(x[start:stop], step, cache)))
        return torch.cat(logits)


@dataclass(frozen=True)
class LayerFactory:
    """Factory of compared layers.

    `loader`: repacks for the device; None for exact products alone.
    """

    loader: RepackingLoader | None
    dtype: torch.dtype
    state: CompareState

    def __deepcopy__(self, copied: dict[int, Any]) -> "LayerFactory":
        """Return the factory itself: a copy of a config that has it shares the state."""
        return self

    def linear(self, weight: Weight, bias: Tensor | None, maximum: Maximum) -> nn.Module:
        """Make the layer of a weight with its bias; `maximum`: as in `Weight.get_linear`."""
        if self.loader is None:
            return ComparedLinear(weight, bias, None, maximum, False, self.state)
        repacked = self._repacked(weight)
        dtype = self.dtype if self.dtype in DTYPES else None
        kernel = repacked.get_linear(bias, maximum=maximum, dtype=dtype)
        module: Any = kernel
        self.state.kernels[weight.layer.name] = repacked.format
        converted = repacked is not weight and _scale_type(module.typed) != _scale_type(repacked)
        return ComparedLinear(weight, module.bias, kernel, maximum, converted, self.state)

    def experts(self, experts: Any, maximum: Maximum) -> nn.Module:
        """Make the layer of an `ExpertsWeight`."""
        if self.loader is None:
            return ComparedExperts(experts, experts, None, self.state)
        repacked = self._experts_repacked(experts)
        self.state.kernels[experts.gate_up.layer.name] = repacked.gate_up.format
        return ComparedExperts(experts, repacked, repacked.get_linear(maximum=maximum), self.state)

    def _repacked(self, weight: Weight) -> Weight:
        assert self.loader is not None
        try:
            return self.loader.repacked(weight)
        except (RepackError, CastError):  # a weight without another order is multiplied as stored
            return weight

    def _experts_repacked(self, experts: Any) -> Any:
        """Repack all matrices in the order of the kernel; none if one of them has no other order."""
        stacks = {}
        for name in ("gate_up", "down"):
            stack = getattr(experts, name)
            try:
                stacks[name] = stacked(stack.layer.name, len(stack), map(self._repacked, stack))
            except MismatchError:
                return experts
        return replace(experts, **stacks)


def _scale_type(weight: Weight) -> torch.dtype | None:
    scales = weight.fields().get("scales")
    return None if scales is None else scales.dtype


def load_compared(
    checkpoint: Checkpoint,
    device: str,
    dtype: torch.dtype | None = None,
    *,
    kernels: bool = True,
    vision: bool = False,
) -> ComparedModel:
    """Load the model of a checkpoint, with kernels for the `device` or without; errors as in `load_model`.

    NotEnoughMemoryError if the device cannot hold the weights, repacked ones twice. `dtype`: dtype of
    activations; None for the config's. `vision`: with the vision parts.
    """
    known = read_sizes(checkpoint.path, checkpoint.model_config)
    activation_dtype, state = dtype or known.dtype or torch.float32, CompareState()
    loader = for_target(checkpoint.loader, target_of_dtype("auto", activation_dtype))
    assert isinstance(loader, RepackingLoader)
    options: dict[str, Any] = {"dtype": activation_dtype, "nonfinite": "allow"}  # a rule reports these scales
    weights = checkpoint.weights_for(device=device, **options)
    _check_memory(weights, torch.device(device), activation_dtype, kernels)
    factory = LayerFactory(loader if kernels else None, activation_dtype, state)
    if isinstance(known, ModelSizes):
        program: Any = import_module("qload.verify.logits.transformers_model")
        model: ComparedModel = program.load_transformers(
            checkpoint.path, known.type, device, activation_dtype, factory
        )
        return model
    makers: dict[str, Any] = {"make": factory.linear, "make_experts": factory.experts}
    if vision:
        makers["make_vision"] = factory.linear
        seeing = load_vision_model(weights, checkpoint.model_config, **makers)
        return ComparedDecoder(seeing, state, activation_dtype)
    return ComparedDecoder(load_model(weights, checkpoint.model_config, **makers), state, activation_dtype)


def _check_memory(weights: Weights, device: torch.device, dtype: torch.dtype, kernels: bool) -> None:
    """Check the memory for all weights; those other than plain floats may be stored in two orders."""
    storage = weights.storage
    infos = [storage.info(name) for name in storage.keys()]  # noqa: SIM118, it is no dict
    again = sum(info.nbytes for info in infos if info.dtype.itemsize == 1 or not info.dtype.is_floating_point)
    check_memory(device, stored_bytes(storage, dtype) + kernels * again, free_bytes(device))


def read_sizes(path: str | PathLike[str], config: Mapping[str, Any]) -> TextConfig | ModelSizes:
    """Read the sizes of a model by its `config.json`; ArgumentError for a type that nothing computes."""
    try:
        return sizes_of_any_type(path, config)
    except ConfigError as error:
        if not error.key.endswith("model_type"):
            raise
        got = f"{error.got}\n{error.hint}" if error.hint else error.got
        raise ArgumentError(f"logits: model_type of {MODEL_CONFIG}", error.expected, got) from error


def read_vision_config(config: Mapping[str, Any], text: TextConfig | ModelSizes) -> VisionConfig | None:
    """Read the vision parts of a `config.json`; None for a type without a vision model of qload."""
    if isinstance(text, ModelSizes) or config.get("model_type") not in TYPES:
        return None
    return vision_config(config, text.hidden, text.eps)


def random_ids(config: TextConfig | ModelSizes, most: int) -> list[int]:
    """Draw the token ids of a prompt without ids, at most `most`."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(config.vocab, (max(0, min(DEFAULT_TOKENS, most)),), generator=generator).tolist()


def random_images(vision: VisionConfig, images: int) -> tuple[Tensor, Tensor]:
    """Draw normalized pixels of a prompt without image files, and their mask."""
    height, width = (vision.tower.patch * min(vision.tower.side, most) for most in RANDOM_PATCHES)
    generator = torch.Generator().manual_seed(SEED)
    pixels = torch.randn(images, vision.tower.channels, height, width, generator=generator)
    return pixels, torch.ones(images, height, width, dtype=torch.bool)


def token_ids(wanted: Sequence[int] | None, config: TextConfig | ModelSizes) -> list[int]:
    """Return the ids of a prompt, below `config.vocab`, at most one a position; otherwise ArgumentError."""
    ids = random_ids(config, config.positions) if wanted is None else list(wanted)
    if not 1 <= len(ids) <= config.positions:
        raise ArgumentError("logits: ids", f"1 to {config.positions}, as there are positions", str(len(ids)))
    wrong = [token for token in ids if not 0 <= token < config.vocab]
    if wrong:
        raise ArgumentError("logits: ids", f"numbers of tokens, 0 to {config.vocab - 1}", str(wrong[0]))
    return ids
