"""What `convert` writes: the names of its targets, and what each is made with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from qload.errors import RepackError
from qload.kernel_formats import awq, compressed_tensors, gptq, marlin_24, marlin_checkpoint
from qload.kernel_formats.plain_integers import Integers
from qload.layouts import STORED_MINUS_ONE, Stored
from qload.listing import MARLIN_CHECKPOINT
from qload.spec import Weight


@dataclass(frozen=True)
class IntegerTarget:
    """A format of integer codes: what writes one layer of it, exactly or not at all.

    `looks_at_codes`: to decide what it refuses.
    """

    write: Callable[[Integers], Weight]
    looks_at_codes: bool = False


def _minus_one(integers: Integers) -> Weight:
    """A zero point of 0, which is all ones once 1 is taken from it, has other readings in kernels."""
    if integers.span[0] == 0 and integers.convention != STORED_MINUS_ONE:
        reason = "kernels read a zero point of 0, stored minus one, as 2**bits; gptq_v2 stores it as it is"
        raise RepackError(integers.source, "gptq", reason)
    return gptq.write(integers, STORED_MINUS_ONE)


INTEGERS: Mapping[str, IntegerTarget] = {
    "gptq": IntegerTarget(_minus_one),
    "gptq_v2": IntegerTarget(lambda integers: gptq.write(integers, Stored())),
    "awq": IntegerTarget(awq.write),
    MARLIN_CHECKPOINT: IntegerTarget(marlin_checkpoint.write),
    "marlin_24": IntegerTarget(marlin_24.write, looks_at_codes=True),
    "compressed-tensors": IntegerTarget(compressed_tensors.write),
}
FLOATS: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
TARGETS = (*INTEGERS, "fp8", *FLOATS)
OLDER_NAMES = {"marlin": MARLIN_CHECKPOINT}  # of targets: "marlin" is a kernel order elsewhere


class Unpacked(Integers):
    """Integers whose codes were not read: a writer makes all of a weight of them but its words."""

    @classmethod
    def of(cls, integers: Integers) -> "Unpacked":
        """The same, and no code of it will be looked at."""
        return cls(**{each.name: getattr(integers, each.name) for each in fields(integers)})

    def _written(self, name: str, shape: Sequence[int], dtype: torch.dtype, write: object) -> Tensor:
        return torch.zeros((), dtype=dtype).expand(tuple(shape))
