"""Pixels of image files equal those of transformers' processor of Idefics2. `nox -s transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qload.models.images import ImageProcessor

Image = pytest.importorskip("PIL.Image")
owner = pytest.importorskip("transformers.models.idefics2.image_processing_pil_idefics2")

SIZES = [(30, 50), (120, 70), (37, 200)]
EDGES = {"shortest_edge": 38, "longest_edge": 98}


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"size": EDGES}, id="by edges"),
        pytest.param({"size": {"height": 60, "width": 40}, "resample": 3}, id="to a shape, bicubic"),
        pytest.param(
            {"size": EDGES, "image_mean": [0.48, 0.45, 0.41], "image_std": [0.5, 0.26, 0.3]}, id="by channel"
        ),
        pytest.param({"do_resize": False, "do_normalize": False}, id="scaled alone"),
    ],
)
def test_pixels_are_those_of_transformers(config: dict[str, Any], split: bool, tmp_path: Path) -> None:
    draw, files = torch.Generator().manual_seed(0), []
    for height, width in SIZES:
        pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=draw)
        files.append(tmp_path / f"{height}.png")
        Image.fromarray(pixels.numpy()).save(files[-1])
    config = {"do_image_splitting": split, **config}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))

    pixels, mask = ImageProcessor.of(tmp_path).load(files)

    expected = owner.Idefics2ImageProcessorPil(**config)([[*map(Image.open, files)]], return_tensors="pt")
    assert torch.equal(pixels, expected["pixel_values"][0])
    assert torch.equal(mask, expected["pixel_attention_mask"][0].bool())
