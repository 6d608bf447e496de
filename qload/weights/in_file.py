"""Elements of tensors that stay in their file until it is known where each of them belongs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qload import devices
from qload.errors import QloadError
from qload.sentences import Digit
from qload.storage import FileRange, FileRanges, SafetensorsStorage, WeightStorage
from qload.storage.protocol import bounds


@dataclass(frozen=True)
class ElementsInFile:
    """Elements of a stored tensor, which are one range of a file here."""

    ranges: FileRanges
    place: FileRange
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return self.place.nbytes

    def move(self, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
        """Elements of `bits` bits, from digits to digits of `target`, which is new memory.

        False where nothing can be told of what it holds then: who reads them otherwise says what is wrong.
        """
        try:
            with self.ranges.descriptor(self.place.file) as descriptor:
                source = descriptor, self.place.begin, self.place.nbytes
                done = devices.move_from_file(source, target, bits, digits)
        except QloadError:
            return False
        if done:
            self.ranges.count(self.place.nbytes)
        return done


def in_file(
    storage: WeightStorage, name: str, index: tuple[slice, ...], device: torch.device
) -> ElementsInFile | None:
    """Elements of a stored tensor for a CPU; None where they are no one range of a file here."""
    if type(storage) is not SafetensorsStorage or device.type != "cpu":  # a subclass may read otherwise
        return None
    info = storage.info(name)
    place = storage.ranges.of(name, bounds(name, info.shape, index))
    return None if place is None else ElementsInFile(storage.ranges, place, info.dtype)
