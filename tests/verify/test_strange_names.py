"""Names outside every format, and names similar to those of a format: a report without an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from qload.checkpoint.layer_index import SUFFIXES, split_name
from qload.spec import named
from qload.verify import inspect, verify

PARTS = st.sampled_from(["", "a", "0", "_", "_data", "a_scales", "é", *sorted(SUFFIXES)])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
SETS = {
    "quanto": ["p.weight._data", "p.weight._scale", "p.input_scale", "p.output_scale"],
    "quanto, 4 bits": ["p.weight._data._data", "p.weight._scale", "p.weight._shift"],
    "torchao": ["p._weight_qdata", "p._weight_scale", "p._weight_per_tensor_scale", "p.bias"],
    "joined to nothing": ["_blocks", "_scales", "a._blocks", "a._scales", "._blocks", "a_blocks"],
    "dots": [".weight", ".qweight", "..weight", "a..weight", ".weight.absmax", ".", "....", "a."],
    "no letters": ["", "weight"],
}


@given(name=NAMES, others=st.sets(NAMES, max_size=3))
def test_a_layer_is_looked_up_under_the_names_that_it_is_stored_under(name: str, others: set[str]) -> None:
    prefix, suffix = split_name(name, {name, *others})

    assert named(prefix, suffix) == name or (prefix, suffix) == (name, "")


def test_names_may_be_nested_deeper_than_calls() -> None:
    names = [".".join("x" * depth) for depth in range(1, 1200)]

    assert split_name(names[-1], names) == ("", names[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_a_file_of_any_names_and_no_config_is_reported_on(tmp_path: Path, names: Any, dtype: Any) -> None:
    save_file({name: torch.ones(2, 8).to(dtype) for name in names}, tmp_path / "model.safetensors")

    for report in (inspect(tmp_path), verify(tmp_path), verify(tmp_path, against=tmp_path, tp=2)):
        assert report.verdict in ("ok", "findings", "unreadable", "unsupported")
