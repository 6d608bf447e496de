"""Tower and connector by their formulas, in float64: image by image, head by head, of real patches alone."""

import math

import pytest
import torch
from torch import Tensor

from qload import FakeWorld, MemoryStorage, Weights
from qload.detect import loader_from_config
from qload.models.vision import load_vision_model, patch_mask
from qload.parallel import ProcessGroup
from tests.models.vision.seeing import CONFIG, LINK, VISION, pictures, sight, text

OF_RANGE = 1e-5  # how far float32 may be off: what logits of models are held to
HEAD = 8  # elements of a head, of the tower and of the resampler


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (n, heads * 8) over k and v (m, fewer heads * 8), all of which are seen."""
    heads, shared = q.shape[1] // HEAD, q.shape[1] // k.shape[1]
    made = []
    for head in range(heads):
        own, of = slice(head * HEAD, head * HEAD + HEAD), head // shared * HEAD
        weights = (q[:, own] @ k[:, of : of + HEAD].T / math.sqrt(HEAD)).softmax(1)
        made.append(weights @ v[:, of : of + HEAD])
    return torch.cat(made, 1)


# As large as the norms' mean squares, and a different one of each part, so that another one is seen.
TOWER_EPS, RESAMPLER_EPS = 0.5, 0.25
SEEING = {
    **CONFIG,
    "vision_config": {**CONFIG["vision_config"], "layer_norm_eps": TOWER_EPS},
    "perceiver_config": {**CONFIG["perceiver_config"], "rms_norm_eps": RESAMPLER_EPS},
}


def centered(x: Tensor, t: dict[str, Tensor], name: str) -> Tensor:
    x = x - x.mean(1, keepdim=True)
    return x / (x.square().mean(1, keepdim=True) + TOWER_EPS).sqrt() * t[f"{name}.weight"] + t[f"{name}.bias"]


def normed(x: Tensor, t: dict[str, Tensor], name: str) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + RESAMPLER_EPS).sqrt() * t[f"{name}.weight"]


def linear(x: Tensor, t: dict[str, Tensor], name: str) -> Tensor:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", torch.zeros(()).double())


def gated(x: Tensor, t: dict[str, Tensor], name: str) -> Tensor:
    gate, up = (linear(x, t, f"{name}.{part}_proj") for part in ("gate", "up"))
    return linear(gate * gate.sigmoid() * up, t, f"{name}.down_proj")


def seen(pixels: Tensor, rows: int, columns: int, t: dict[str, Tensor]) -> Tensor:
    """The vectors of the patches of an image (3, H, W) that has so many of its own: (rows * columns, 32)."""
    weight, places = t[f"{VISION}.embeddings.patch_embedding.weight"], []
    for row in range(rows):
        for column in range(columns):
            patch = pixels[:, row * 7 : row * 7 + 7, column * 7 : column * 7 + 7]
            place = (5 * row // rows) * 5 + 5 * column // columns
            vector = weight.flatten(1) @ patch.flatten() + t[f"{VISION}.embeddings.patch_embedding.bias"]
            places.append(vector + t[f"{VISION}.embeddings.position_embedding.weight"][place])
    x = torch.stack(places)
    for layer in (f"{VISION}.encoder.layers.{n}" for n in range(2)):
        own = centered(x, t, f"{layer}.layer_norm1")
        q, k, v = (linear(own, t, f"{layer}.self_attn.{part}_proj") for part in "qkv")
        x = x + linear(attended(q, k, v), t, f"{layer}.self_attn.out_proj")
        wide = linear(centered(x, t, f"{layer}.layer_norm2"), t, f"{layer}.mlp.fc1")
        wide = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        x = x + linear(wide, t, f"{layer}.mlp.fc2")
    return centered(x, t, f"{VISION}.post_layernorm")


def resampled(patches: Tensor, t: dict[str, Tensor]) -> Tensor:
    """What an image's patches (n, 32) become: (5, 64)."""
    context = gated(patches, t, f"{LINK}.modality_projection")
    x = t[f"{LINK}.perceiver_resampler.latents"]
    for layer in (f"{LINK}.perceiver_resampler.layers.{n}" for n in range(2)):
        own = normed(x, t, f"{layer}.input_latents_norm")
        both = torch.cat([normed(context, t, f"{layer}.input_context_norm"), own])
        q = linear(own, t, f"{layer}.self_attn.q_proj")
        k, v = (linear(both, t, f"{layer}.self_attn.{part}_proj") for part in "kv")
        x = x + linear(attended(q, k, v), t, f"{layer}.self_attn.o_proj")
        x = x + gated(normed(x, t, f"{layer}.post_attention_layernorm"), t, f"{layer}.mlp")
    return normed(x, t, f"{LINK}.perceiver_resampler.norm")


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_become_what_the_formulas_say(ranks: int) -> None:
    tensors, (pixels, mask, _) = sight(), pictures()
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    sizes = [(4, 3), (2, 3)]  # of 28 x 21 pixels, and of 15 rows of them
    expected = torch.cat(
        [
            resampled(seen(pixels[0, at].double(), *size, wide), wide)
            for at, size in zip((0, 2), sizes, strict=True)
        ]
    )

    def work(group: ProcessGroup) -> Tensor:
        storage = MemoryStorage(tensors | text())
        weights = Weights(storage, loader=loader_from_config(None), process_group=group)
        return load_vision_model(weights, SEEING).images(pixels, mask)

    for made in FakeWorld(ranks).run(work):
        assert (made - expected).abs().max() <= OF_RANGE * (expected.max() - expected.min())


def test_the_tower_alone_is_its_formula() -> None:
    tensors, (pixels, mask, _) = sight(), pictures()
    weights = Weights(MemoryStorage(tensors | text()), loader=loader_from_config(None))
    expected = seen(pixels[0, 2].double(), 2, 3, {name: tensor.double() for name, tensor in tensors.items()})

    made = load_vision_model(weights, SEEING).tower(pixels[:, 2], patch_mask(mask[:, 2].bool(), 7))

    assert (made[0, :6] - expected).abs().max() <= OF_RANGE * (expected.max() - expected.min())


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [(7, 7, 1, 1), (13, 7, 1, 1), (7, 28, 1, 4), (28, 7, 4, 1), (42, 14, 6, 2)],
    ids=["one patch", "one patch and a part", "one row", "one column", "more rows than were trained"],
)
def test_an_image_of_few_patches_is_seen_by_the_formulas(
    height: int, width: int, rows: int, columns: int
) -> None:
    tensors = sight()
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    pixels = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(3))
    weights = Weights(MemoryStorage(tensors | text()), loader=loader_from_config(None))
    expected = resampled(seen(pixels[0].double(), rows, columns, wide), wide)

    made = load_vision_model(weights, SEEING).images(pixels)

    assert made.shape == expected.shape == (5, 64)
    assert (made - expected).abs().max() <= OF_RANGE * (expected.max() - expected.min())


def test_a_resampler_that_says_no_length_has_the_eps_of_the_text() -> None:
    tensors, own = sight(), dict(SEEING["perceiver_config"], rms_norm_eps=0.0625)
    del own["hidden_size"]
    reads = {**CONFIG["text_config"], "rms_norm_eps": RESAMPLER_EPS}
    weights = Weights(MemoryStorage(tensors | text()), loader=loader_from_config(None))
    pixels = torch.randn(1, 3, 7, 7, generator=torch.Generator().manual_seed(4))
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    expected = resampled(seen(pixels[0].double(), 1, 1, wide), wide)

    model = load_vision_model(weights, {**SEEING, "perceiver_config": own, "text_config": reads})

    assert (model.images(pixels) - expected).abs().max() <= OF_RANGE * (expected.max() - expected.min())
