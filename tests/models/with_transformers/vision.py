"""A model that sees against transformers' Idefics2, images included, its text stored in several formats."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from qload.models.cache import PagedCache
from qload.models.step import Step
from qload.models.vision.model import VisionModel, load_vision_model
from qload.parallel import ProcessGroup
from qload.quantize import Quantizer
from tests.models.recorded import Rounded
from tests.models.vision.seeing import CONFIG, pictures, sight, text
from tests.models.with_transformers.twins import assert_close, twin
from tests.verify.damage.model import Model
from tests.verify.damage.sound import Quantize
from tests.verify.damage.sound_floats import MORE

WIDE: dict[str, Any] = {
    **CONFIG,
    "perceiver_config": {**CONFIG["perceiver_config"], "hidden_size": 256},
    "text_config": {
        **CONFIG["text_config"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 128,
        "sliding_window": None,
    },
}
GROUP = 32


def awq(make: Callable[[Quantize, dict[str, Any]], Model]) -> Model:
    """Four bits, asymmetric, eight neighbouring outputs in a word, in AWQ's order."""

    def words(codes: Tensor) -> Tensor:
        places = codes.view(codes.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        word = sum(places[..., at].long() << (4 * at) for at in range(8))
        return (word - ((word >> 31) << 32)).int()  # type: ignore[operator, union-attr]

    def quantize(matrix: Tensor) -> dict[str, Tensor]:
        groups = matrix.T.reshape(-1, GROUP, matrix.shape[0])
        low, high = groups.amin(1), groups.amax(1)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
        codes = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
        return {"qweight": words(codes.flatten(0, 1).int()), "qzeros": words(zeros.int()), "scales": scales}

    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return make(quantize, said)


def gptq_act_order(make: Callable[[Quantize, dict[str, Any]], Model]) -> Model:
    """Four bits, symmetric, eight neighbouring inputs in a word, whose groups lie out of order."""

    def quantize(matrix: Tensor) -> dict[str, Tensor]:
        N, K = matrix.shape
        order = torch.randperm(K, generator=torch.Generator().manual_seed(K)) // GROUP
        most = torch.stack([matrix.T[order == group].abs().amax(0) for group in range(K // GROUP)])
        scales = (most / 7.5).half()
        codes = (matrix.T / scales.float()[order] + 8).round().clamp(0, 15).long().view(K // 8, 8, N)
        word = sum(codes[:, at] << (4 * at) for at in range(8))
        qweight = (word - ((word >> 31) << 32)).int()  # type: ignore[operator, union-attr]
        qzeros = torch.full((K // GROUP, N // 8), 0x77777777, dtype=torch.int32)  # stored less one
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": order.int()}

    said = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": True}
    return make(quantize, said)


FORMS: dict[str, Callable[..., Model]] = {
    "awq": awq,
    "gptq act order": gptq_act_order,
    **{name: MORE[name] for name in ("plain", "fp8", "nf4", "packed", "int8")},
}


def made(quantize: Quantize, said: dict[str, Any] | None) -> Model:
    """The model with its text quantized so; what sees is stored plain."""
    tensors = sight(WIDE) | text(WIDE, quantize=quantize)
    return Model(tensors, WIDE if said is None else {**WIDE, "quantization_config": said})


def plain_of(weights: Weights, names: list[str]) -> dict[str, Tensor]:
    """What all layers of a text mean, and all other tensors as they are."""
    matrices = {name.removesuffix(".weight"): name for name in text(WIDE) if "_proj" in name}
    meant = {name: weights.get_weights(prefix).dequantize() for prefix, name in matrices.items()}
    rest = [name for name in names if not name.startswith(tuple(f"{prefix}." for prefix in matrices))]
    return meant | {name: weights.storage.read(name) for name in rest}


def logits(model: VisionModel, ranks: int) -> Tensor:
    pixels, mask, ids = pictures()
    cache = PagedCache.of(model.text.config, pages=2, ranks=ranks, dtype=torch.float32)
    step = Step.of([0], tokens=len(ids), pages=[[1, 0]], page_size=16)
    return model(ids, step, cache, model.images(pixels, mask))


def wanted(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    pixels, mask, ids = pictures()
    theirs = twin(folder, tensors, WIDE, sees=True)
    with torch.no_grad():
        return theirs(ids[None], pixel_values=pixels, pixel_attention_mask=mask).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_a_quantized_text_that_sees_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    model = FORMS[form](make=made)
    loader = loader_from_config(model.config.get("quantization_config"))
    config, storage = copy.deepcopy(model.config), MemoryStorage(model.tensors)
    want = wanted(tmp_path, plain_of(Weights(storage, loader=loader), list(model.tensors)))

    def work(group: ProcessGroup) -> Tensor:
        weights = Weights(storage, loader=loader, process_group=group, dtype=torch.float32)
        return logits(load_vision_model(weights, config, make=Rounded(torch.float32).linear), group.size())

    for ranks in (1, 2):
        answers = FakeWorld(ranks).run(work)
        assert all(each.equal(answers[0]) for each in answers)
        assert_close(answers[0], want)
    assert config == model.config


QUANTIZERS: list[Quantizer] = [
    Fp8Quantizer(),
    Fp8Quantizer("block", (128, 128)),
    EETQQuantizer(),
    BNBInt8Quantizer(),
    BNB4Quantizer("nf4"),
]


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_logits_of_a_text_quantized_while_loading_are_those_of_transformers(
    quantizer: Quantizer, tmp_path: Path
) -> None:
    tensors = sight(WIDE) | text(WIDE)
    loader = QuantizingLoader(loader_from_config(None), quantizer)
    weights = Weights(MemoryStorage(tensors), loader=loader, dtype=torch.float32)
    head = weights.get_weights("lm_head").dequantize()
    want = wanted(tmp_path, plain_of(weights, list(tensors)) | {"lm_head.weight": head})

    made = logits(load_vision_model(weights, WIDE, make=Rounded(torch.float32).linear), 1)

    assert_close(made, want)


def test_a_folder_is_read_as_it_lies(tmp_path: Path) -> None:
    tensors = sight(WIDE) | text(WIDE)
    want = wanted(tmp_path / "theirs", tensors)
    folder = tmp_path / "ours"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**WIDE, "torch_dtype": "float32"}))

    assert_close(logits(load_vision_model(folder), 1), want)
