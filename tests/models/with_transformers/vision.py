"""A model that sees against transformers' Idefics2, images included, its text stored in several formats."""

import copy
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
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
from qload.checkpoint import Checkpoint
from qload.cli import main
from qload.detect import loader_from_config
from qload.models.kv_cache import PagedCache, Step
from qload.models.vision import VisionModel, load_vision_model
from qload.parallel import ProcessGroup
from qload.quantize import Quantizer
from qload.verify import Prompt
from qload.verify.logits.compared_model import ModelPrompt, load_compared
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


def stored(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))
    return folder


def test_a_folder_is_read_as_it_lies(tmp_path: Path) -> None:
    tensors = sight() | text()
    want = wanted(tmp_path / "theirs", tensors)

    assert_close(logits(load_vision_model(stored(tmp_path / "ours", tensors)), 1), want)


def test_logits_that_verify_compares_are_those_of_transformers(tmp_path: Path) -> None:
    tensors = sight() | text()
    folder, theirs = stored(tmp_path / "ours", tensors), twin(tmp_path / "theirs", tensors, CONFIG, sees=True)
    prompt = ModelPrompt.of(Prompt(), folder, CONFIG)
    pixels, mask = prompt.images

    with torch.no_grad(), Checkpoint.open(folder) as checkpoint:
        compared = load_compared(checkpoint, "cpu", vision=True)
        ids, images = torch.tensor([prompt.ids]), {"pixel_values": pixels, "pixel_attention_mask": mask}
        want = theirs(ids, **{name: each[None] for name, each in images.items()}).logits[0]
        for compared.state.follows in ("meaning", "kernel"):
            assert_close(compared.compute_logits(prompt), want)


def test_run_prints_the_logits_of_transformers_for_image_files(tmp_path: Path) -> None:
    library = pytest.importorskip("PIL.Image")
    images = pytest.importorskip("transformers.models.idefics2.image_processing_pil_idefics2")
    tensors, size = sight() | text(), {"shortest_edge": 21, "longest_edge": 28}
    folder, draw = stored(tmp_path / "ours", tensors), torch.Generator().manual_seed(3)
    options = {"size": size, "do_image_splitting": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(options))
    files = [folder / "a.png", folder / "b.png"]
    for file, shape in zip(files, ((40, 30, 3), (21, 60, 3)), strict=True):
        library.fromarray(torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).numpy()).save(file)
    ids = [7, *[95] * 25, 3, 9, *[95] * 25, 2]  # an image and its quarters, of 5 vectors each
    theirs = twin(tmp_path / "theirs", tensors, CONFIG, sees=True)
    seen = images.Idefics2ImageProcessorPil(**options)([[*map(library.open, files)]], return_tensors="pt")
    with torch.no_grad():
        want = theirs(torch.tensor([ids]), **seen).logits[0, -1]

    command = ["run", folder, "--prompt-ids", ",".join(map(str, ids)), "--logits", "--tokens", 0]
    result = CliRunner().invoke(main, [*map(str, command), *(f"--image={file}" for file in files)])

    assert result.exit_code == 0, result.output
    assert_close(torch.tensor(json.loads(result.stdout.splitlines()[0])), want)
