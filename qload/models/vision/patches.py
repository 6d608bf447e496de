"""Which pixels of an image are real, which patches these make, and which trained position each patch has.

Images of a batch have one size; `pixel_mask` says which of an image's pixels are its own, the rest is padding
on the right and below. A patch counts where all of its pixels do. Source: `modeling_idefics2.py` of
transformers 5.23.0, whose operations these are, as a quotient on the border of two positions is decided by
how it was rounded.
"""

import torch
from torch import Tensor

from qload.errors import ArgumentError, ShapeError, checked

INSIDE = 1.0 - 1e-6  # the last place of an image's side, from 0 to 1


@checked
def real_images(pixels: Tensor, pixel_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The images of all texts, one after another, without those that only fill a batch, which are all 0.

    `pixels`: (images, channels, height, width), or (texts, images, channels, height, width). `pixel_mask`:
    which pixels are real, as `pixels` without channels, bool or integers; None: all. Both are given back,
    the mask as bool (images, height, width). ShapeError.
    """
    if pixels.ndim not in (4, 5):
        raise ShapeError("pixels", "([texts,] images, channels, height, width)", tuple(pixels.shape))
    flat = pixels.flatten(0, -4)
    mask = flat.new_ones((flat.shape[0], *flat.shape[2:]), dtype=torch.bool)
    if pixel_mask is not None:
        expected = (*pixels.shape[:-3], *pixels.shape[-2:])
        if tuple(pixel_mask.shape) != expected:
            raise ShapeError("pixel_mask", f"{expected}, as pixels", tuple(pixel_mask.shape))
        mask = pixel_mask.reshape(mask.shape).bool()
    real = flat.ne(0).flatten(1).any(1)
    return flat[real], mask[real]


def patch_mask(pixel_mask: Tensor, patch: int) -> Tensor:
    """Which patches of `patch` x `patch` pixels are real: (images, rows, columns), bool.

    `pixel_mask`: (images, height, width), bool; what lies beyond the last whole patch counts for nothing.
    ShapeError for images that are smaller than a patch.
    """
    if min(pixel_mask.shape[1:]) < patch:
        expected = f"(images, height, width) of at least a patch, {patch} x {patch}"
        raise ShapeError("pixel_mask", expected, tuple(pixel_mask.shape))
    patches = pixel_mask.unfold(1, patch, patch).unfold(2, patch, patch)
    return patches.all(-1).all(-1)


def patch_positions(mask: Tensor, side: int) -> Tensor:
    """The trained position of each patch: (images, rows * columns), int64, 0 <= position < `side` ** 2.

    An image's own rows and columns, which `mask` (images, rows, columns) tells, are spread over the `side`
    x `side` positions that were trained; patches that are no image's have position 0. ArgumentError for an
    image whose first row or column of patches is not its own.
    """
    counts = mask[:, :, 0].sum(1), mask[:, 0, :].sum(1)
    if any(bool(count.eq(0).any()) for count in counts):
        raise ArgumentError("pixel_mask", "a whole patch at the top and at the left of each image", "none")
    rows, columns = (_buckets(count, size, side) for count, size in zip(counts, mask.shape[1:], strict=True))
    positions = rows[:, :, None] * side + columns[:, None, :]
    return torch.where(mask, positions, 0).flatten(1)


def _buckets(count: Tensor, size: int, side: int) -> Tensor:
    """Of each of `size` places, of which an image has `count` (images,): which of `side` places it is."""
    borders = torch.arange(1 / side, 1.0, 1 / side, device=count.device)
    places = torch.arange(size, device=count.device, dtype=torch.float32)
    fractions = places[None, :] * (1.0 / count)[:, None]
    return torch.bucketize(fractions.clamp(max=INSIDE), borders, right=True)
