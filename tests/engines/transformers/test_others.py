"""Whole models of other tools, and one that sees, on qload in transformers.

Collected where transformers is installed. QLOAD_CASES may name a folder with more models of other tools.
"""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from qload import MemoryStorage, Weights, loader_from_config
from qload.engines import transformers as engine
from qload.engines.transformers import LinearSlot, TypedExperts
from qload.errors import UnsupportedFormatError
from tests.engines.transformers.models import EAGER, RANGE, logits, of_kind
from tests.models.recorded import OWN, Rounded, off, owners_dtype, recorded
from tests.models.vision.seeing import CONFIG, pictures, sight, text
from tests.models.with_transformers.stored import FORMATS
from tests.models.with_transformers.twins import assert_close, twin
from tests.models.with_transformers.vision import meant
from tests.paths import FIXTURES
from tests.verify.damage.model import Model

CASES = Path(os.environ.get("QLOAD_CASES", FIXTURES)) / "models"
FOLDERS = sorted({*(FIXTURES / "models").iterdir(), *(CASES.iterdir() if CASES.is_dir() else ())})


def round_weights(model: Any, dtype: torch.dtype) -> None:
    """What a tool computed with that dequantizes to a dtype."""
    rounded = Rounded(dtype)
    for slot in of_kind(model, LinearSlot).values():
        slot.linear = rounded.linear(slot.linear.typed, None, None)
    for experts in of_kind(model, TypedExperts).values():
        experts.linear = rounded.experts(experts.linear.typed, None)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_model_of_another_tool_has_the_logits_that_it_recorded(folder: Path) -> None:
    if not list(folder.glob("model*.safetensors")):
        pytest.skip("not a checkpoint of safetensors")
    try:
        model = engine.load(folder, dtype=torch.float32, activations="unquantized", target=None)
    except UnsupportedFormatError:
        pytest.skip("of a format that qload does not read")
    ids, want = recorded(folder)
    dtype = owners_dtype(folder) if (folder / OWN).exists() else Rounded.of(folder).dtype
    round_weights(model, dtype)

    assert off(logits(model, ids), want) < RANGE


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_that_sees_has_the_logits_of_what_its_text_means(name: str, tmp_path: Path) -> None:
    form, draw = FORMATS[name], torch.Generator().manual_seed(3)
    tensors = sight() | text(quantize=lambda matrix: dict(form.layer(*matrix.shape, draw)))
    config = {**copy.deepcopy(CONFIG), "quantization_config": dict(form.section)}
    loader = loader_from_config(config["quantization_config"])
    plain = twin(tmp_path / "means", meant(Weights(MemoryStorage(tensors), loader=loader)), CONFIG, sees=True)
    path = Model(tensors, config).write(tmp_path / "stored")

    options = {"model_class": AutoModelForImageTextToText, "activations": "unquantized", **EAGER}
    model = engine.load(path, dtype=torch.float32, **options)

    pixels, mask, ids = pictures()
    given = {"input_ids": ids[None], "pixel_values": pixels, "pixel_attention_mask": mask}
    with torch.no_grad():
        assert_close(model(**given).logits, plain(**given).logits)
    assert all(".text_model." in each for each in of_kind(model, LinearSlot))
    assert len(of_kind(model, LinearSlot)) == 14
