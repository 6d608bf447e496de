"""`qload run --image`: a prompt with images gives the tokens of the model itself, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from qload.cli import main
from qload.models import Engine, load_vision_model
from qload.models.images import ImageProcessor
from tests.models.vision.seeing import CONFIG, sight, text

Image = pytest.importorskip("PIL.Image")

IDS = [7, *[95] * 5, 3, 9, *[95] * 5, 2]  # two images of 5 vectors


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["run", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(sight() | text(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))
    size = {"shortest_edge": 21, "longest_edge": 28}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    draw = torch.Generator().manual_seed(3)
    for name, shape in (("a", (40, 30, 3)), ("b", (21, 60, 3))):
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{name}.png")
    return tmp_path


def arguments(folder: Path, *names: str) -> list[Any]:
    images = [part for name in names for part in ("--image", folder / f"{name}.png")]
    return [folder, "--prompt-ids", ",".join(map(str, IDS)), "--logits", *images]


def test_images_are_a_part_of_the_prompt_in_their_order(folder: Path) -> None:
    model = load_vision_model(folder)
    pixels = ImageProcessor.of(folder).load([folder / "a.png", folder / "b.png"])
    engine = Engine(model.text, max_tokens=len(IDS) + 4)
    embeddings = model.embed(torch.tensor(IDS), model.images(*pixels))
    expected = engine.prefill(IDS, embeddings=embeddings)[0].tolist()
    following = [chosen[0] for chosen in engine.stream([IDS], 4, embeddings=[embeddings])]

    result = run(*arguments(folder, "a", "b"), "--tokens", 4)
    exchanged = run(*arguments(folder, "b", "a"), "--tokens", 4)

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[0]) == expected
    assert result.stdout.splitlines()[1] == ",".join(map(str, following))
    assert json.loads(exchanged.stdout.splitlines()[0]) != expected


def test_each_image_of_a_text_becomes_its_tokens(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra text")
    edge = 94
    words = {
        "<fake_token_around_image>": edge,
        "<image>": 95,
        **{f"w{number}": number for number in range(10)},
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([*words])
    tokenizer.save(str(folder / "tokenizer.json"))
    images = ["--image", folder / "a.png", "--image", folder / "b.png", "--logits", "--tokens", 2]
    image = [edge, *[95] * 5, edge]
    ids = [7, *image, 3, 9, *image, 2]

    told = run(folder, "--prompt-ids", ",".join(map(str, ids)), *images)
    found = run(folder, "--prompt", "w7<image>w3w9<image>w2", *images)
    one = run(folder, "--prompt", "w7<image>w2", *images)

    logits, _, chosen = found.stdout.splitlines()
    assert [logits, chosen] == told.stdout.splitlines()
    assert one.exit_code == 2
    assert "expected <image> 2 times, once for each --image, got 1 times" in one.stderr


@pytest.mark.parametrize("names", ["a", "aba"])
def test_another_number_of_images_than_in_the_prompt_is_refused(folder: Path, names: str) -> None:
    result = run(*arguments(folder, *names))

    assert result.exit_code == 2
    assert f"{5 * len(names)} tokens 95, 5 for each of {len(names)} encoded images" in result.stderr


def test_a_model_without_vision_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG["text_config"], "torch_dtype": "float32"}))

    result = run(*arguments(folder, "a", "b"))

    assert result.exit_code == 2
    assert "a type with vision: idefics2" in result.stderr


def test_a_file_that_is_missing_is_refused_before_the_model_is_read(folder: Path) -> None:
    assert run(*arguments(folder, "c")).exit_code == 2
