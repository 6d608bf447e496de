"""A text model that sees: what a tower and a connector make of images stands among the vectors of words.

    model = load_vision_model(path)
    images = model.images(pixels, pixel_mask)                # (images * vectors of each, H)
    logits = model(ids, step, cache, images)

The tower and the connector are loaded with a loader of plain weights, within `use_loader`, so that no
quantizer reaches them: neither that of the checkpoint nor one that quantizes while loading.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from qload.detect import DefaultWeightsLoader, read_model_config
from qload.errors import ShapeError, checked
from qload.experts import ExpertFacts, ExpertSplit
from qload.listing import check_all_read
from qload.loader.finite_scales import Nonfinite
from qload.methods.loaded import LinearFactory
from qload.methods.parallel_experts import ExpertsFactory
from qload.models.cache import PagedCache
from qload.models.config import text_config
from qload.models.decoder import Decoder
from qload.models.load import Making, load_decoder, opened, tell_unused
from qload.models.shares import check_shares
from qload.models.step import Step
from qload.models.vision.config import sight_config
from qload.models.vision.connector import Connector
from qload.models.vision.patches import patch_mask, real_images
from qload.models.vision.tower import Tower
from qload.parallel import ProcessGroup
from qload.weights import Weights


class VisionModel(nn.Module):
    """A text model with a tower and a connector, or one rank's share of them.

    Parameters
    ----------
    text
        What reads.
    tower, connector
        What sees, and what makes vectors of a text of that.
    image_token
        The word in whose places an image's vectors are put.
    """

    def __init__(self, text: Decoder, tower: Tower, connector: Connector, image_token: int) -> None:
        super().__init__()
        self.text, self.tower, self.connector = text, tower, connector
        self.image_token: int = image_token

    def images(self, pixels: Tensor, pixel_mask: Tensor | None = None) -> Tensor:
        """The vectors of all images, one image after another: (images * latents, H).

        `pixels`: ([texts,] images, channels, height, width), floats; images that are 0 everywhere fill a
        batch, and have none. `pixel_mask`: ([texts,] images, height, width), which pixels are real; None:
        all. ShapeError, and ArgumentError for an image without a patch of its own.
        """
        pixels, real = real_images(pixels, pixel_mask)
        if not len(pixels):
            return self.connector.latents[:0]
        mask = patch_mask(real, self.tower.config.patch)
        patches = self.tower(pixels.to(self.tower.patches), mask)
        return self.connector(patches, mask.flatten(1)).flatten(0, 1)  # type: ignore[no-any-return]

    def embed(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        """The vectors (T, H) of words `ids` (T,), those of `images` (vectors, H) in the places of their word.

        ShapeError where there are not as many places as vectors. None: the word is one as any other.
        """
        x = self.text.embed(ids)
        if images is None:
            return x
        places = (ids == self.image_token).nonzero().squeeze(1)
        if (len(places), x.shape[1]) != tuple(images.shape):
            expected = f"({len(places)}, {x.shape[1]}), as the text has so many places for images"
            raise ShapeError("images", expected, tuple(images.shape))
        return x.index_copy(0, places, images.to(x))

    def forward(self, ids: Tensor, step: Step, cache: PagedCache, images: Tensor | None = None) -> Tensor:
        """The logits (T, vocab) of the words `ids` (T,) of a `step`, whose keys and values go to `cache`.

        `images`: as of `embed`, those of the new tokens.
        """
        return self.text.logits(self.text.hidden(self.embed(ids, images), step, cache))


@checked
def load_vision_model(
    weights: Weights | str | PathLike[str],
    config: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    process_group: ProcessGroup | None = None,
    make: LinearFactory | None = None,
    make_experts: ExpertsFactory | None = None,
    expert_split: ExpertSplit | None = "tensor",
    facts: ExpertFacts | None = None,
    nonfinite: Nonfinite = "error",
) -> VisionModel:
    """The model of a checkpoint that sees, or this rank's share of it.

    The text may be stored in any format, or be quantized while it is loaded; what sees stays plain. All
    parameters are those of `load_model`, and the `config` stays as it is.

    Parameters
    ----------
    weights, config
        A path, or tensors and the whole `config.json`, without which tensors say too little.
    device, dtype, process_group, nonfinite
        Of a path.
    make, make_experts, expert_split, facts
        Of the text.

    Raises
    ------
    ConfigError
        For a type that does not see, those that do listed, and for what cannot be believed.
    MissingTensorError, ShapeError
        Where the checkpoint has not what the config says.
    CutError, DivideError
        Where the ranks cannot share it.
    """
    if not isinstance(weights, Weights):
        config = read_model_config(weights) if config is None else config
        with opened(weights, config, device, dtype, process_group, facts, nonfinite) as found:
            return load_vision_model(
                found, config, make=make, make_experts=make_experts, expert_split=expert_split, facts=facts
            )
    check_all_read(weights)
    text = text_config(config or {}, facts)
    sight = sight_config(config or {}, text.hidden, text.eps)
    making = Making.of(weights, text, make, make_experts, expert_split)
    check_shares(weights, text, making.base, making.head, making.split)
    with weights.use_loader(DefaultWeightsLoader()):
        tower = Tower.load(weights, "model.vision_model", sight.tower)
        features, lead = sight.tower.hidden, "model.connector"
        connector = Connector.load(weights, lead, sight.resampler, features, text.inner, text.activation)
    decoder = load_decoder(weights, text, making)
    tell_unused(weights, str((config or {}).get("model_type")))
    return VisionModel(decoder, tower, connector, sight.image_token)
