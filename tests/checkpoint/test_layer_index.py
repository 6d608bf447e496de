"""A tensor's name, parted into the prefix of a layer and what formats call it."""

import pytest

from qload.checkpoint.layer_index import split_name


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("layers.0.up_proj.qweight", ("layers.0.up_proj", "qweight")),
        ("layers.0.up_proj.weight.absmax", ("layers.0.up_proj", "weight.absmax")),
        ("a.weight.quant_state.bitsandbytes__nf4", ("a", "weight.quant_state.bitsandbytes__nf4")),
        ("experts.gate_up_proj_blocks", ("experts.gate_up_proj", "_blocks")),
        ("gate_blocks", ("gate", "_blocks")),
        ("Gate_blocks", ("Gate", "_blocks")),
        ("experts._blocks", ("experts._blocks", "")),
        ("layers.0.stranger", ("layers.0", "stranger")),
        ("qweight", ("", "qweight")),
    ],
)
def test_a_name_parts_where_the_formats_say(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name, ()) == parts
