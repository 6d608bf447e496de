"""Which patches an image has, and where they are among those that a tower was trained on."""

import pytest
import torch

from qload.errors import ArgumentError, ShapeError
from qload.models.vision import patch_mask, patch_positions, real_images


def mask_of(*sizes: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    mask = torch.zeros(len(sizes), rows, columns, dtype=torch.bool)
    for image, (own_rows, own_columns) in enumerate(sizes):
        mask[image, :own_rows, :own_columns] = True
    return mask


def test_an_image_of_the_trained_size_has_every_position_once() -> None:
    positions = patch_positions(mask_of((5, 5), rows=5, columns=5), 5)

    assert positions.equal(torch.arange(25)[None])


def test_a_larger_image_repeats_positions_and_a_smaller_one_leaves_some_out() -> None:
    # Row r of R is at r / R of the side: of 8 positions, floor(8 r / R) in whole numbers.
    for rows, columns in ((16, 4), (2, 8), (4, 16), (1, 1)):
        places = [
            (8 * row // rows, 8 * column // columns) for row in range(rows) for column in range(columns)
        ]
        made = patch_positions(mask_of((rows, columns), rows=rows, columns=columns), 8)
        assert made.tolist() == [[8 * row + column for row, column in places]]


def test_images_of_a_batch_have_positions_by_their_own_sizes() -> None:
    mask = mask_of((4, 4), (2, 3), rows=4, columns=4)

    both = patch_positions(mask, 4)
    alone = patch_positions(mask_of((2, 3), rows=2, columns=3), 4)

    assert both[0].equal(torch.arange(16))
    assert both[1].view(4, 4)[:2, :3].flatten().equal(alone[0])
    assert both[1].view(4, 4)[~mask[1]].eq(0).all()


def test_a_patch_is_real_where_all_of_its_pixels_are() -> None:
    pixels = mask_of((7, 12), (8, 3), rows=8, columns=13)

    assert patch_mask(pixels, 4).tolist() == [
        [[True, True, True], [False, False, False]],
        [[False, False, False], [False, False, False]],
    ]


@pytest.mark.parametrize(("height", "width"), [(4, 4), (4, 7), (7, 4), (7, 7)])
def test_an_image_of_one_patch_has_one_and_its_position_is_the_first(height: int, width: int) -> None:
    patches = patch_mask(torch.ones(2, height, width, dtype=torch.bool), 4)

    assert patches.tolist() == [[[True]], [[True]]]
    for side in (1, 2, 8):
        assert patch_positions(patches, side).tolist() == [[0], [0]]


def test_a_tower_of_one_position_has_it_for_all_patches() -> None:
    assert patch_positions(mask_of((3, 2), rows=3, columns=2), 1).tolist() == [[0] * 6]


def test_an_image_without_a_patch_of_its_own_is_refused() -> None:
    with pytest.raises(ArgumentError, match="pixel_mask"):
        patch_positions(mask_of((4, 4), (0, 0), rows=4, columns=4), 4)


@pytest.mark.parametrize("size", [(3, 8), (8, 3)])
def test_an_image_smaller_than_a_patch_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match="4 x 4"):
        patch_mask(torch.ones(1, *size, dtype=torch.bool), 4)


def test_images_that_fill_a_batch_are_dropped_with_their_masks() -> None:
    pixels, mask = torch.zeros(2, 3, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.int64)
    for text, image in ((0, 0), (0, 2), (1, 0)):
        pixels[text, image, 0, 0, 0] = text * 10 + image + 1.0
        mask[text, image, : image + 1] = 1

    found, own = real_images(pixels, mask)

    assert found[:, 0, 0, 0].tolist() == [1.0, 3.0, 11.0]
    assert own.dtype == torch.bool
    assert own[:, :, 0].sum(1).tolist() == [1, 3, 1]


def test_without_a_mask_all_pixels_are_real() -> None:
    found, own = real_images(torch.ones(2, 3, 4, 6), None)

    assert found.shape == (2, 3, 4, 6)
    assert own.shape == (2, 4, 6)
    assert own.all()


def test_pixels_and_masks_of_other_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="pixels"):
        real_images(torch.ones(3, 4, 6), None)
    with pytest.raises(ShapeError, match="pixel_mask"):
        real_images(torch.ones(2, 3, 4, 6), torch.ones(2, 3, 4, 6))
