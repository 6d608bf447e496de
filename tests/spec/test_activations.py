"""Group sizes of the schemes of quantized inputs."""

import pytest

from qload.errors import ArgumentError
from qload.spec import ActivationScheme


@pytest.mark.parametrize("strategy", ["group", "block", "tensor_group"])
def test_a_scale_of_adjacent_inputs_needs_their_number(strategy: str) -> None:
    with pytest.raises(ArgumentError, match=f"group_size\n  expected at least 1, with {strategy}"):
        ActivationScheme("float", 8, True, strategy)

    assert ActivationScheme("float", 8, True, strategy, 32).size == 32


@pytest.mark.parametrize("strategy", ["token", "tensor", "channel", None])
def test_other_scales_have_no_number_of_inputs(strategy: str | None) -> None:
    assert ActivationScheme("float", 8, True, strategy, 32).size is None
