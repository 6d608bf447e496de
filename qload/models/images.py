"""Image files as pixels and prompt tokens of a vision-language model, by its `preprocessor_config.json`.

    processor = ImageProcessor.of(path)
    pixels, pixel_mask = processor.load(["photo.jpg"])       # for VisionModel.images
    text = processor.expand("Describe: <image>", images=1, vectors=64)

Pillow, an optional dependency, decodes and resizes. Source: `image_processing_pil_idefics2.py` and
`processing_idefics2.py` of transformers 5.23.0, with their keys and defaults.
"""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from qload.configs import Excerpt, FoundConfig, validate, value_text
from qload.detect.config_reader import read_json
from qload.errors import ArgumentError, ConfigError, checked
from qload.models.vision_config import VisionConfig
from qload.storage import is_directory, is_taken, snapshot

FILE = "preprocessor_config.json"
IMAGE_TEXT, BOUNDARY_TEXT = "<image>", "<fake_token_around_image>"
SPLIT_IMAGES = 5  # four quarters of an image, and the whole one
MAX_SIDE = 1 << 14  # pixels

Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Channels = Annotated[tuple[Number, Number, Number], Field(strict=False)]


class _Size(Excerpt):
    shortest_edge: Side | None = None
    longest_edge: Side | None = None
    height: Side | None = None
    width: Side | None = None


class _Fields(Excerpt):
    do_image_splitting: bool = False
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    resample: Annotated[int, Field(ge=0, le=5)] = 2  # Pillow's number of a filter; 2: bilinear
    rescale_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1 / 255
    image_mean: Channels = (0.5, 0.5, 0.5)
    image_std: Channels = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ImageProcessor:
    """Preprocessing of images.

    Attributes
    ----------
    split
        Whether the four quarters of an image are encoded too, before the image.
    edges
        Shortest and longest side of a resized image; None: `shape`, or no resizing.
    shape
        (height, width) of a resized image, or None.
    resample
        Pillow's number of the filter.
    scale
        Factor of a pixel's bytes, or None.
    mean, std
        Subtracted from each channel, and its divisor; None: neither.
    """

    split: bool
    edges: tuple[int, int] | None
    shape: tuple[int, int] | None
    resample: int
    scale: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @classmethod
    @checked
    def of(cls, path: str | PathLike[str]) -> "ImageProcessor":
        """Read the config of the checkpoint at `path`; ArgumentError without one, ConfigError if invalid."""
        place = Path(snapshot(path))
        folder = place if is_directory(place) else place.parent
        if not is_taken(folder / FILE, FILE):
            raise ArgumentError("image", f"a checkpoint with {FILE}", f"none in {folder}")
        values = read_json(folder / FILE)
        source = FoundConfig(FILE, "", values)
        fields = validate(_Fields, source)
        edges, shape = None, None
        if fields.do_resize:
            edges, shape = _read_size(values.get("size"))
        if fields.do_normalize and not all(std > 0 for std in fields.image_std):
            raise ConfigError(FILE, "image_std", "divisors above 0", str([*fields.image_std]))
        return cls(
            fields.do_image_splitting,
            edges,
            shape,
            fields.resample,
            fields.rescale_factor if fields.do_rescale else None,
            fields.image_mean if fields.do_normalize else None,
            fields.image_std if fields.do_normalize else None,
        )

    def count(self, images: int) -> int:
        """Return the number of encoded images, with the quarters of split ones."""
        return images * (SPLIT_IMAGES if self.split else 1)

    def expand(self, text: str, images: int, vectors: int) -> str:
        """Replace each `<image>` of a prompt by its image tokens, `vectors` per encoded image.

        ArgumentError unless there is one `<image>` per image.
        """
        if text.count(IMAGE_TEXT) != images:
            expected = f"{IMAGE_TEXT} {images} times, once for each --image"
            raise ArgumentError("prompt", expected, f"{text.count(IMAGE_TEXT)} times")
        tokens = f"{BOUNDARY_TEXT}{IMAGE_TEXT * vectors}{BOUNDARY_TEXT}" * self.count(1)
        text = text.replace(IMAGE_TEXT, tokens).replace(BOUNDARY_TEXT * 2, BOUNDARY_TEXT)
        return re.sub(rf"{BOUNDARY_TEXT}(?=[^\s<])", f"{BOUNDARY_TEXT} ", text)

    def load(self, files: Sequence[str | PathLike[str]]) -> tuple[Tensor, Tensor]:
        """Read image files: pixels (images, 3, height, width), float32, and the mask of the real ones.

        Smaller images are padded with 0 on the right and below. ArgumentError if Pillow is not installed, and
        for a file that it cannot decode.
        """
        images = [self._pixels(part) for file in files for part in self._parts(file)]
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        pixels = torch.zeros(len(images), 3, height, width)
        mask = torch.zeros(len(images), height, width, dtype=torch.bool)
        for number, image in enumerate(images):
            pixels[number, :, : image.shape[1], : image.shape[2]] = image
            mask[number, : image.shape[1], : image.shape[2]] = True
        return pixels, mask

    def _parts(self, file: str | PathLike[str]) -> Iterator[Any]:
        """Yield the quarters of an image, if it is split, and the image."""
        image = read_image(file)
        if self.split:
            width, height = image.size
            x, y = width // 2, height // 2
            if not x or not y:
                got = f"{height} x {width} pixels in {fspath(file)}"
                raise ArgumentError("image", "at least 2 x 2 pixels, as images are split", got)
            boxes = ((0, 0, x, y), (x, 0, width, y), (0, y, x, height), (x, y, width, height))
            yield from (image.crop(box) for box in boxes)
        yield image

    def _pixels(self, image: Any) -> Tensor:
        """Resize, scale and normalize an image: (3, height, width)."""
        width, height = image.size
        height, width = self.shape or (resized(height, width, self.edges) if self.edges else (height, width))
        image = image.resize((width, height), resample=self.resample)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        values = pixels.view(height, width, 3).permute(2, 0, 1)
        scaled = values.float() if self.scale is None else (values.double() * self.scale).float()
        if self.mean is None or self.std is None:
            return scaled
        mean, std = (torch.tensor(each)[:, None, None] for each in (self.mean, self.std))
        return (scaled - mean) / std


def check_image_tokens(ids: Sequence[int], vision: VisionConfig, images: int) -> None:
    """Raise ArgumentError unless a prompt has one image token per vector of the encoded images."""
    count, token = vision.resampler.latents * images, vision.image_token
    if ids.count(token) != count:
        expected = f"{count} tokens {token}, {vision.resampler.latents} for each of {images} encoded images"
        raise ArgumentError("prompt_ids", expected, str(ids.count(token)))


def _read_size(size: Any) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Return the (shortest, longest) edge or the (height, width) of resized images."""
    if size is None:
        return (378, 980), None
    if not isinstance(size, dict):
        raise ConfigError(FILE, "size", "an object", value_text(size))
    fields = validate(_Size, FoundConfig(FILE, "size", size))
    if fields.shortest_edge and fields.longest_edge:
        return (fields.shortest_edge, fields.longest_edge), None
    if fields.height and fields.width:
        return None, (fields.height, fields.width)
    raise ConfigError(FILE, "size", "shortest_edge and longest_edge, or height and width", value_text(size))


def resized(height: int, width: int, edges: tuple[int, int]) -> tuple[int, int]:
    """Return the (height, width) of an image after resizing to `edges`, (shortest, longest)."""
    shortest, longest = edges
    ratio = width / height
    if width >= height and width > longest:
        height, width = int(longest / ratio), longest
    elif height > width and height > longest:
        height, width = longest, int(longest * ratio)
    return max(height, shortest), max(width, shortest)


def read_image(file: str | PathLike[str]) -> Any:
    """Decode an image file to RGB, upright by its EXIF data: Pillow's `Image`."""
    name = fspath(file)
    try:
        library, operations = import_module("PIL.Image"), import_module("PIL.ImageOps")
    except ImportError as error:
        expected = "Pillow installed: pip install 'qload-weights[images]'"
        raise ArgumentError("image", expected, f"{name} ({error!s:.80})") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", library.DecompressionBombWarning)
            with library.open(name) as image:
                return operations.exif_transpose(image).convert("RGB")
    except Exception as error:  # a decoder raises any class for a malformed file
        raise ArgumentError("image", "an image that Pillow decodes", f"{name}: {error!s:.160}") from error
