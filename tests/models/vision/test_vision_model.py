"""A model that sees: worlds of several ranks, quantizers that reach the text alone, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import (
    BNB4Quantizer,
    BNBInt8Quantizer,
    EETQQuantizer,
    FakeWorld,
    Fp8Quantizer,
    MemoryStorage,
    QuantizingLoader,
    Weights,
    WeightsLoader,
)
from qload.detect import loader_from_config
from qload.errors import ConfigError, CutError, DivideError, MissingTensorError, QloadError, ShapeError
from qload.models.config import text_config
from qload.models.decoder import load_model
from qload.models.kv_cache import PagedCache, Step
from qload.models.vision import VisionModel, load_vision_model
from qload.parallel import ProcessGroup
from qload.quantize import Quantizer
from tests.models.vision.seeing import CONFIG, pictures, sight, text

pytestmark = pytest.mark.usefixtures("seen_texts", "seen_logs")

PLAIN = loader_from_config(None)
OF_RANGE = 1e-5  # how far float32 may be off: what logits of models are held to


def loaded(
    tensors: dict[str, Tensor],
    loader: WeightsLoader = PLAIN,
    group: ProcessGroup | None = None,
    config: dict[str, Any] | None = None,
    **how: Any,
) -> VisionModel:
    weights = Weights(MemoryStorage(tensors), loader=loader, process_group=group)
    return load_vision_model(weights, CONFIG if config is None else config, **how)


def answer(model: VisionModel, ranks: int = 1) -> Tensor:
    pixels, mask, ids = pictures()
    cache = PagedCache.of(model.text.config, pages=2, ranks=ranks, dtype=torch.float32)
    step = Step.of([0], tokens=len(ids), pages=[[1, 0]], page_size=16)
    return model(ids, step, cache, model.images(pixels, mask))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_sees_what_one_alone_sees(ranks: int) -> None:
    tensors = sight() | text()
    alone = answer(loaded(tensors))

    made = FakeWorld(ranks).run(lambda group: answer(loaded(tensors, group=group), ranks))

    assert all(each.equal(made[0]) for each in made)
    assert (made[0] - alone).abs().max() <= OF_RANGE * (alone.max() - alone.min())


def test_images_are_seen_one_by_one_as_together() -> None:
    model, (pixels, mask, _) = loaded(sight() | text()), pictures()

    both = model.images(pixels, mask)
    each = [model.images(pixels[:, at], mask[:, at]) for at in (0, 2)]

    assert both.shape == (10, 64)
    assert (both - torch.cat(each)).abs().max() <= OF_RANGE * (both.max() - both.min())


def test_a_batch_of_nothing_but_filling_has_no_images() -> None:
    model, (_, _, ids) = loaded(sight() | text()), pictures()
    words = ids.masked_fill(ids == model.image_token, 1)

    none = model.images(torch.zeros(1, 2, 3, 28, 21))

    assert none.shape == (0, 64)
    assert model.embed(words, none).equal(model.embed(words))


def test_padding_around_an_image_is_not_seen() -> None:
    model, (pixels, mask, _) = loaded(sight() | text()), pictures()
    other = pixels.clone()
    other[0, 2, :, 15:] = 9.0

    assert model.images(other, mask).equal(model.images(pixels, mask))


def test_without_images_the_model_reads() -> None:
    model, (_, _, ids) = loaded(sight() | text()), pictures()
    step = Step.of([0], tokens=len(ids), pages=[[0, 1]], page_size=16)
    caches = [PagedCache.of(model.text.config, pages=2, dtype=torch.float32) for _ in range(2)]

    assert model(ids, step, caches[0]).equal(model.text(ids, step, caches[1]))


QUANTIZERS: list[Quantizer] = [
    Fp8Quantizer(),
    Fp8Quantizer("block", (16, 16)),
    EETQQuantizer(),
    BNBInt8Quantizer(),
    BNB4Quantizer("nf4"),
]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_trap_64_a_quantizer_that_works_while_loading_reaches_the_text_alone(quantizer: Quantizer) -> None:
    tensors = sight() | text()
    config, kept = copy.deepcopy(CONFIG), copy.deepcopy(CONFIG)
    loader, formats = QuantizingLoader(PLAIN, quantizer), set()

    def make(weight: Any, bias: Any, maximum: Any) -> torch.nn.Module:
        formats.add((weight.format, ".layers." in weight.layer.name))
        return weight.get_linear(bias, activations="unquantized")  # type: ignore[no-any-return]

    model, plain = loaded(tensors, loader, config=config, make=make), loaded(tensors)
    pixels, mask, _ = pictures()

    assert model.images(pixels, mask).equal(plain.images(pixels, mask))
    assert (quantizer.format, True) in formats
    assert config == kept
    again = loaded(tensors, loader, config=config, make=make)
    assert again.images(pixels, mask).equal(plain.images(pixels, mask))


def test_trap_64_the_loader_of_the_text_is_back_after_an_error() -> None:
    tensors = sight() | text()
    del tensors["model.connector.perceiver_resampler.norm.weight"]
    loader = QuantizingLoader(PLAIN, Fp8Quantizer())
    weights = Weights(MemoryStorage(tensors), loader=loader)

    with pytest.raises(MissingTensorError, match="perceiver_resampler"):
        load_vision_model(weights, CONFIG)

    assert weights.loader is loader


def test_all_tensors_of_a_model_that_sees_are_read_once() -> None:
    weights = Weights(MemoryStorage(sight() | text()), loader=PLAIN)

    load_vision_model(weights, CONFIG)

    report = weights.report()
    assert report.unused == []
    assert report.twice == {}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_floats_are_those_of_the_text_or_else_of_the_whole_model(key: str) -> None:
    whole = {**CONFIG, key: "bfloat16"}

    assert text_config(whole).dtype == torch.bfloat16
    inner = {**whole, "text_config": {**CONFIG["text_config"], key: "float16"}}
    assert text_config(inner).dtype == torch.float16
    assert text_config(CONFIG).dtype is None


def test_tensors_that_are_of_no_layer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    loaded(sight() | text() | {"model.audio_model.weight": torch.ones(2)})

    assert "1 tensors belong to no layer of a idefics2 model: model.audio_model.weight" in caplog.text


def test_as_many_images_as_places_for_them() -> None:
    model, (pixels, mask, ids) = loaded(sight() | text()), pictures()

    with pytest.raises(ShapeError, match=r"10, 64"):
        model.embed(ids, model.images(pixels[:, :1], mask[:, :1]))


@pytest.mark.parametrize(
    "name",
    [
        "model.vision_model.embeddings.position_embedding.weight",
        "model.vision_model.encoder.layers.1.mlp.fc1.weight",
        "model.connector.perceiver_resampler.latents",
        "model.connector.perceiver_resampler.layers.0.self_attn.k_proj.weight",
        "model.connector.modality_projection.down_proj.weight",
    ],
)
def test_tensors_of_other_sizes_than_the_config_says_are_refused(name: str) -> None:
    tensors = sight() | text()
    tensors[name] = torch.ones(24, 24)

    with pytest.raises(ShapeError, match=name.removesuffix(".weight").replace(".", r"\.")):
        loaded(tensors)


def test_heads_that_ranks_cannot_share_are_refused_by_all_alike() -> None:
    tensors = sight() | text()
    config = {**CONFIG, "vision_config": {**CONFIG["vision_config"], "num_attention_heads": 2}}

    def work(group: ProcessGroup) -> str:
        with pytest.raises(DivideError, match=r"model\.vision_model") as refused:
            loaded(tensors, group=group, config=config)
        return str(refused.value)

    assert len(set(FakeWorld(4).run(work))) == 1


def test_a_text_that_ranks_cannot_share_is_refused_before_anything_is_read() -> None:
    tensors = sight() | text()
    name = "model.text_model.layers.1.mlp.down_proj.weight"
    codes, scales = tensors[name].to(torch.float8_e4m3fn), torch.ones(1, 1)
    stored = tensors | {name: codes, f"{name}_scale_inv": scales}
    section = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    read: set[str] = set()

    class Watched(MemoryStorage):
        def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
            read.add(name)
            return super().read(name, index)

    def work(group: ProcessGroup) -> None:
        weights = Weights(Watched(stored), loader=loader_from_config(section), process_group=group)
        load_vision_model(weights, CONFIG)

    with pytest.raises(CutError, match=r"layers\.1\.mlp\.down_proj"):
        FakeWorld(2).run(work)
    assert read == set()


def test_what_sees_is_never_read_as_if_it_were_plain() -> None:
    tensors = sight() | text()
    name = "model.vision_model.encoder.layers.0.mlp.fc1"
    codes = tensors.pop(f"{name}.weight").to(torch.float8_e4m3fn)
    tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": torch.ones(48, 1)}

    with pytest.raises(QloadError, match=name.replace(".", r"\.")):
        loaded(tensors)


def test_a_model_that_only_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="a type with vision: idefics2"):
        loaded(text(), config={**CONFIG["text_config"]})


def test_pixels_of_other_colours_are_refused() -> None:
    model = loaded(sight() | text())

    with pytest.raises(ShapeError, match="pixels"):
        model.images(torch.ones(1, 4, 28, 28))


NAMES = [
    ("model.text_model", "lm_head"),
    ("model.language_model", "lm_head"),
    ("language_model.model", "language_model.lm_head"),
]


@pytest.mark.parametrize(("base", "head"), NAMES)
def test_the_text_of_a_model_that_sees_is_a_model_alone(base: str, head: str) -> None:
    """By the names of Idefics2, those that transformers 5 gives to most, and those of before."""
    ids, reads = pictures()[2], text()
    alone = {name.replace("model.text_model.", "model."): tensor for name, tensor in reads.items()}
    within = {name.replace("model.text_model", base): tensor for name, tensor in reads.items()}
    within[f"{head}.weight"] = within.pop("lm_head.weight")

    made = []
    for tensors in (alone, within | sight()):
        weights = Weights(MemoryStorage(tensors), loader=PLAIN)
        model = load_model(weights, CONFIG)
        cache = PagedCache.of(model.config, pages=2, dtype=torch.float32)
        made.append(model(ids, Step.of([0], tokens=len(ids), pages=[[0, 1]], page_size=16), cache))

    assert made[0].equal(made[1])
