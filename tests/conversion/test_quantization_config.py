"""Quantization config of a conversion: conventions of zero points, and claims of unchanged layers."""

import json
from pathlib import Path
from typing import Any

import pytest

from qload import convert
from qload.conversion.quantization_config import quantization_config
from qload.conversion.targets import OutputLayer
from qload.formats import GPTQConfig, GPTQWeight
from qload.layouts import Stored, StoredMinusOne, StoredMinusOnePerField
from tests.verify.checkpoints import GPTQ, gptq, model

pytestmark = pytest.mark.usefixtures("seen_texts")

V2, WHOLE, FIELDS = Stored(), StoredMinusOne(), StoredMinusOnePerField()
# Convention and evidence of each layer; expected checkpoint_format, or None: no config covers both.
CONVENTIONS: list[tuple[list[tuple[Any, Any]], str | None]] = [
    ([(WHOLE, "alike"), (WHOLE, "alike")], "gptq"),
    ([(WHOLE, "alike"), (FIELDS, "codes")], "gptq"),
    ([(FIELDS, "codes"), (WHOLE, "alike")], "gptq"),
    ([(WHOLE, None), (FIELDS, "codes")], None),
    ([(V2, "alike"), (V2, None)], "gptq_v2"),
    ([(V2, "alike"), (V2, "alike")], "gptq_v2"),
    ([(V2, "alike"), (WHOLE, "alike")], None),
    ([(V2, "alike"), (WHOLE, "none")], None),
    ([(V2, None), (WHOLE, "alike")], None),
    ([(V2, None), (FIELDS, "codes")], None),
]


@pytest.mark.parametrize(("told", "format"), CONVENTIONS)
def test_a_config_says_one_convention_of_zero_points(told: list[tuple[Any, Any]], format: str | None) -> None:
    layers = [
        OutputLayer(f"l{at}", GPTQWeight, GPTQConfig(4, 64, zeros, evidence=evidence), 64)
        for at, (zeros, evidence) in enumerate(told)
    ]

    written = quantization_config(layers, [])

    if format is None:
        assert set(written.refused) == {"l0", "l1"}
        assert all("two conventions" in why for why in written.refused.values())
    else:
        assert written.values is not None
        assert (written.values["checkpoint_format"], written.refused) == (format, {})


def test_a_kept_layer_of_another_convention_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """One layer has plain zero points; those of the other are 0 if read as stored minus one."""
    (tmp_path / "source").mkdir()
    tensors = {**gptq("a", zero=7), **gptq("b", zero=15)}
    source = model(tmp_path / "source", tensors, quantization_config={**GPTQ, "sym": False})

    made = convert(source, tmp_path / "made", to="gptq_v2", keep=["b"])

    assert {layer.outcome for layer in made.layers} == {"refused"}
    assert "two conventions" in made.layers[0].detail
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("base", "own"), [(True, False), (False, True), (True, None), (False, None)])
def test_a_kept_layer_is_symmetric_where_the_claims_of_its_own_module_say_so(
    base: bool, own: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    rules = {} if own is None else {"dynamic": {r"+:^b$": {"sym": own}}}
    source = model(
        tmp_path / "source", {**gptq("a"), **gptq("b")}, quantization_config={**GPTQ, "sym": base, **rules}
    )

    made = convert(source, tmp_path / "made", to="gptq", keep=["b"])

    assert made.verdict == "ok"
    written = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert written["sym"] == (base if own is None else own)
