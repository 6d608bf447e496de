"""Numbers of bits that no kernel order holds."""

from dataclasses import replace

import pytest
import torch

from qload import GPTQConfig, GPTQWeight, repack
from qload.errors import RepackError
from qload.kernel_formats.repack import targets
from qload.spec.integers import Integers

pytestmark = pytest.mark.usefixtures("seen_texts")


class FiveBits(GPTQWeight):
    """A weight of another project, with codes of five bits."""

    def to_integers(self) -> Integers:
        return replace(super().to_integers(), bits=5)


@pytest.mark.parametrize("layout", targets(GPTQWeight))
def test_codes_of_other_bits_are_refused_with_the_reason(layout: str) -> None:
    tensors = {
        "qweight": torch.zeros(8, 64, dtype=torch.int32),
        "qzeros": torch.zeros(2, 8, dtype=torch.int32),
        "scales": torch.ones(2, 64).half(),
        "g_idx": torch.arange(64, dtype=torch.int32) // 32,
    }
    weight = FiveBits(config=GPTQConfig(bits=4, group_size=32), **tensors)

    with pytest.raises(RepackError, match="2, 3, 4 or 8 bits, got 5"):
        repack(weight, layout)
