"""Image files as pixels and prompt tokens: sizes, quarters, values, padding, refused files."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qload.errors import ArgumentError, ConfigError
from qload.models.images import ImageProcessor, resized

pytestmark = pytest.mark.usefixtures("seen_texts")

Image = pytest.importorskip("PIL.Image")

PIXELS = torch.randint(0, 256, (20, 30, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
KEEP = {"do_resize": False}


def processor(folder: Path, **config: Any) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return ImageProcessor.of(folder)


def save(path: Path, pixels: torch.Tensor = PIXELS, **options: Any) -> Path:
    Image.fromarray(pixels.numpy()).save(path, **options)
    return path


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param((400, 500), (400, 500), id="within both edges"),
        pytest.param((100, 200), (378, 378), id="too small"),
        pytest.param((1000, 2000), (490, 980), id="too wide"),
        pytest.param((2000, 1000), (980, 490), id="too high"),
        pytest.param((10, 5000), (378, 980), id="a strip"),
    ],
)
def test_sizes_are_limited_by_both_edges(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized(*size, (378, 980)) == expected


def test_pixels_are_scaled_and_normalized_by_channel(tmp_path: Path) -> None:
    mean, std = [0.25, 0.5, 0.75], [0.5, 0.25, 1.0]
    images = processor(tmp_path, **KEEP, image_mean=mean, image_std=std)

    pixels, mask = images.load([save(tmp_path / "a.png")])

    expected = (PIXELS.permute(2, 0, 1) / 255.0 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    assert pixels.shape == (1, 3, 20, 30)
    assert bool(mask.all())
    assert (pixels[0] - expected).abs().max() <= 4 * torch.finfo(torch.float32).eps * expected.abs().max()


def test_smaller_images_are_padded_on_the_right_and_below(tmp_path: Path) -> None:
    files = [save(tmp_path / "a.png"), save(tmp_path / "b.png", PIXELS[:7, :11].contiguous())]
    images = processor(tmp_path, **KEEP, do_rescale=False, do_normalize=False)

    pixels, mask = images.load(files)

    assert torch.equal(pixels[0], PIXELS.permute(2, 0, 1).float())
    assert torch.equal(pixels[1, :, :7, :11], PIXELS[:7, :11].permute(2, 0, 1).float())
    assert int(mask[1].sum()) == 7 * 11
    assert int(pixels[1].masked_fill(mask[1], 0).count_nonzero()) == 0


def test_a_split_image_follows_its_quarters(tmp_path: Path) -> None:
    options = {**KEEP, "do_rescale": False, "do_normalize": False, "do_image_splitting": True}

    pixels, mask = processor(tmp_path, **options).load([save(tmp_path / "a.png")])

    whole = PIXELS.permute(2, 0, 1).float()
    quarters = [whole[:, :10, :15], whole[:, :10, 15:], whole[:, 10:, :15], whole[:, 10:, 15:]]
    assert [int(part.sum()) for part in mask] == [150] * 4 + [600]
    assert all(torch.equal(pixels[n, :, :10, :15], quarter) for n, quarter in enumerate(quarters))
    assert torch.equal(pixels[4], whole)


@pytest.mark.parametrize("size", [{"height": 8, "width": 12}, {"shortest_edge": 8, "longest_edge": 12}])
def test_images_are_resized_to_the_size_of_the_config(tmp_path: Path, size: dict[str, int]) -> None:
    pixels, _ = processor(tmp_path, size=size).load([save(tmp_path / "a.png")])

    assert pixels.shape == (1, 3, 8, 12)


def test_an_image_is_upright_and_without_transparency(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = save(tmp_path / "a.png", exif=exif)
    alpha = torch.cat([PIXELS, PIXELS[..., :1]], -1)
    images = processor(tmp_path, **KEEP)

    assert images.load([turned])[0].shape == (1, 3, 30, 20)
    assert images.load([save(tmp_path / "b.png", alpha)])[0].shape == (1, 3, 20, 30)


FAKE, TOKEN = "<fake_token_around_image>", "<image>"


@pytest.mark.parametrize(
    ("text", "images", "split", "expected"),
    [
        pytest.param("a <image> b", 1, False, f"a {FAKE}{TOKEN}{TOKEN}{FAKE} b", id="one image"),
        pytest.param("<image>b", 1, False, f"{FAKE}{TOKEN}{TOKEN}{FAKE} b", id="a word behind it"),
        pytest.param(
            "<image><image>", 2, False, f"{FAKE}{TOKEN * 2}{FAKE}{TOKEN * 2}{FAKE}", id="two neighbours"
        ),
        pytest.param("<image>", 1, True, f"{FAKE}{TOKEN * 2}" * 5 + FAKE, id="quarters"),
    ],
)
def test_a_text_has_the_tokens_of_each_image(
    tmp_path: Path, text: str, images: int, split: bool, expected: str
) -> None:
    assert processor(tmp_path, do_image_splitting=split).expand(text, images, 2) == expected


def test_a_text_names_each_image_once(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="<image> 2 times, once for each --image\n  got      1 times"):
        processor(tmp_path).expand("<image>", 2, 4)


def test_a_checkpoint_without_a_config_of_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"a checkpoint with preprocessor_config\.json"):
        ImageProcessor.of(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("size", {"height": 8}),
        ("size", 8),
        ("size", {"height": 0, "width": 8}),
        ("image_mean", [0.5]),
        ("image_std", [0.5, 0.0, 0.5]),
        ("rescale_factor", -1.0),
        ("resample", 9),
        ("do_image_splitting", "yes"),
    ],
)
def test_an_invalid_config_is_refused_by_its_key(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"preprocessor_config\.json: .*{key}"):
        processor(tmp_path, **{key: value})


def test_a_file_that_is_no_image_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 64)

    with pytest.raises(ArgumentError, match=r"an image that Pillow decodes\n  got      .*a\.png"):
        processor(tmp_path).load([tmp_path / "a.png"])


def test_an_image_of_too_many_pixels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)

    with pytest.raises(ArgumentError, match="an image that Pillow decodes"):
        processor(tmp_path).load([file])


def test_a_missing_pillow_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)

    with pytest.raises(ArgumentError, match=r"pip install 'qload-weights\[images\]'"):
        processor(tmp_path).load([tmp_path / "a.png"])


def test_an_image_of_one_row_has_no_quarters(tmp_path: Path) -> None:
    file = save(tmp_path / "a.png", PIXELS[:1].contiguous())

    with pytest.raises(ArgumentError, match=r"at least 2 x 2 pixels.*\n.*1 x 30 pixels"):
        processor(tmp_path, do_image_splitting=True).load([file])


def test_a_place_that_is_no_path_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"path\n  expected str"):
        ImageProcessor.of(3)  # type: ignore[arg-type]
