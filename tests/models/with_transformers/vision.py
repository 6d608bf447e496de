"""A model that sees against transformers' Idefics2, images included, its text stored in several formats."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
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
)
from qload.detect import loader_from_config
from qload.models.kv_cache import PagedCache, Step
from qload.models.vision import VisionModel, load_vision_model
from qload.parallel import ProcessGroup
from qload.quantize import Quantizer
from tests.models.recorded import Rounded
from tests.models.vision.seeing import CONFIG, pictures, sight, text
from tests.models.with_transformers.stored import FORMATS
from tests.models.with_transformers.twins import assert_close, twin

NAMES = [name.removesuffix(".weight") for name in text() if "_proj" in name]  # of what is quantized


def meant(weights: Weights) -> dict[str, Tensor]:
    """What the layers of a text mean, and all other tensors as they are."""
    names, quantized = weights.storage.keys(), tuple(f"{name}." for name in NAMES)
    rest = [name for name in names if not name.startswith(quantized)]
    means = {f"{name}.weight": weights.get_weights(name).dequantize() for name in NAMES}
    return means | {name: weights.storage.read(name) for name in rest}


def logits(model: VisionModel, ranks: int) -> Tensor:
    pixels, mask, ids = pictures()
    cache = PagedCache.of(model.text.config, pages=2, ranks=ranks, dtype=torch.float32)
    step = Step.of([0], tokens=len(ids), pages=[[1, 0]], page_size=16)
    return model(ids, step, cache, model.images(pixels, mask))


def wanted(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    pixels, mask, ids = pictures()
    theirs = twin(folder, tensors, CONFIG, sees=True)
    with torch.no_grad():
        return theirs(ids[None], pixel_values=pixels, pixel_attention_mask=mask).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["plain", *FORMATS])
def test_logits_of_a_quantized_text_that_sees_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config, generator, reads = copy.deepcopy(CONFIG), torch.Generator().manual_seed(3), text()
    if name != "plain":
        form = FORMATS[name]
        config["quantization_config"] = dict(form.section)
        reads = text(quantize=lambda matrix: dict(form.layer(*matrix.shape, generator)))
    kept, storage = copy.deepcopy(config), MemoryStorage(sight() | reads)
    loader = loader_from_config(config.get("quantization_config"))
    want = wanted(tmp_path, meant(Weights(storage, loader=loader)))

    def work(group: ProcessGroup) -> Tensor:
        weights = Weights(storage, loader=loader, process_group=group, dtype=torch.float32)
        return logits(load_vision_model(weights, config, make=Rounded(torch.float32).linear), group.size())

    for ranks in (1, 2):
        answers = FakeWorld(ranks).run(work)
        assert all(each.equal(answers[0]) for each in answers)
        assert_close(answers[0], want)
    assert config == kept


QUANTIZERS: list[Quantizer] = [
    Fp8Quantizer(),
    Fp8Quantizer("block", (32, 32)),
    EETQQuantizer(),
    BNBInt8Quantizer(),
    BNB4Quantizer("nf4"),
]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_logits_of_a_text_quantized_while_loading_are_those_of_transformers(
    quantizer: Quantizer, tmp_path: Path
) -> None:
    tensors = sight() | text()
    loader = QuantizingLoader(loader_from_config(None), quantizer)
    weights = Weights(MemoryStorage(tensors), loader=loader, dtype=torch.float32)
    head = weights.get_weights("lm_head").dequantize()
    want = wanted(tmp_path, meant(weights) | {"lm_head.weight": head})

    made = logits(load_vision_model(weights, CONFIG, make=Rounded(torch.float32).linear), 1)

    assert_close(made, want)


def test_a_folder_is_read_as_it_lies(tmp_path: Path) -> None:
    tensors = sight() | text()
    want = wanted(tmp_path / "theirs", tensors)
    folder = tmp_path / "ours"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))

    assert_close(logits(load_vision_model(folder), 1), want)
