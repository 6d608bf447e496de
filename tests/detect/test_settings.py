"""Settings in their intended meaning, or an error with file and key; never a default in their place."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qload.configs import FoundConfig
from qload.detect import loader_from_config, read_claims
from qload.errors import ConfigError, QloadError, UnsupportedFormatError
from qload.formats import AWQConfig, GPTQConfig
from qload.layouts import Stored
from tests.detect.settings import AWQ, GPTQ
from tests.example_counts import at_most


@pytest.mark.parametrize(
    ("change", "config"),
    [
        pytest.param({}, GPTQConfig(4, 128), id="v1"),
        pytest.param({"checkpoint_format": "gptq"}, GPTQConfig(4, 128), id="v1 by name"),
        pytest.param({"checkpoint_format": "gptq_v2"}, GPTQConfig(4, 128, Stored()), id="v2"),
        pytest.param({"format": "gptq_v2"}, GPTQConfig(4, 128, Stored()), id="v2 in the other spelling"),
        pytest.param({"bits": 3, "group_size": -1}, GPTQConfig(3, -1), id="3 bits, one group"),
        pytest.param({"lm_head": True, "pack_dtype": "int32"}, GPTQConfig(4, 128), id="lm_head too"),
        pytest.param(
            {"sym": None, "desc_act": None}, GPTQConfig(4, 128), id="nothing about sym and desc_act"
        ),
        pytest.param({"dynamic": {}}, GPTQConfig(4, 128), id="no dynamic rules"),
        pytest.param(
            {"dynamic": {"-:.*mlp.*": {}}}, GPTQConfig(4, 128), id="a rule that leaves modules plain"
        ),
    ],
)
def test_a_gptq_config_is_read_as_it_is_meant(change: dict[str, Any], config: GPTQConfig) -> None:
    assert loader_from_config({**GPTQ, **change}).formats[0].config == config


def test_an_awq_config_is_read_as_it_is_meant() -> None:
    assert loader_from_config(AWQ).formats[0].config == AWQConfig(64)
    assert loader_from_config({**AWQ, "version": "GEMM"}).formats[0].config == AWQConfig(64)
    assert loader_from_config({**AWQ, "zero_point": False}).formats[0].config == AWQConfig(64, 4, False)
    assert loader_from_config({**AWQ, "bits": 8}).formats[0].config == AWQConfig(64, 8)


MARLIN = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({**MARLIN, "quant_method": "gptq", "checkpoint_format": "marlin"}, "marlin", id="gptq"),
        pytest.param({**MARLIN, "quant_method": "gptq", "is_marlin_format": True}, "marlin", id="old gptq"),
        pytest.param({"quant_method": "marlin", "group_size": 128}, "marlin", id="marlin"),
        pytest.param(
            {**MARLIN, "quant_method": "marlin", "checkpoint_format": "marlin_24"}, "marlin_24", id="2:4"
        ),
        pytest.param(
            {**MARLIN, "quant_method": "gptq", "checkpoint_format": "marlin_24"}, "marlin_24", id="gptq 2:4"
        ),
        pytest.param(
            {**MARLIN, "quant_method": "marlin", "is_marlin_24_format": True}, "marlin_24", id="old 2:4"
        ),
        pytest.param({**MARLIN, "quant_method": "gptq_marlin_24"}, "marlin_24", id="gptq_marlin_24"),
    ],
)
def test_marlin_checkpoints_are_told_by_every_name_they_go_by(config: dict[str, Any], expected: str) -> None:
    weight_type = loader_from_config(config).formats[0]

    assert (weight_type.weight_type.format, weight_type.config.name, weight_type.config.group_size) == (
        expected,
        expected,
        128,
    )


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("key", "value", "text"),
    [("desc_act", True, "False"), ("sym", False, "True"), ("bits", 3, "4 or 8"), ("group_size", 0, "-1 or")],
)
def test_a_marlin_config_claims_nothing_that_marlin_cannot_say(key: str, value: Any, text: str) -> None:
    config = {**MARLIN, "quant_method": "marlin", key: value}

    with pytest.raises(ConfigError) as caught:
        loader_from_config(config)

    assert caught.value.key == f"quantization_config.{key}"
    assert text in caught.value.expected


MALFORMED = [
    pytest.param(GPTQ, {"bits": ...}, "bits", "a value", "nothing", id="bits missing"),
    pytest.param(GPTQ, {"bits": "4"}, "bits", "2, 3, 4 or 8", "'4'", id="bits as text"),
    pytest.param(GPTQ, {"bits": 4.0}, "bits", "2, 3, 4 or 8", "4.0", id="bits as a fraction"),
    pytest.param(GPTQ, {"bits": True}, "bits", "2, 3, 4 or 8", "True", id="bits as a boolean"),
    pytest.param(GPTQ, {"bits": 5}, "bits", "2, 3, 4 or 8", "5", id="five bits"),
    pytest.param(GPTQ, {"bits": None}, "bits", "2, 3, 4 or 8", "nothing", id="bits null"),
    pytest.param(GPTQ, {"group_size": ...}, "group_size", "a value", "nothing", id="group_size missing"),
    pytest.param(GPTQ, {"group_size": 0}, "group_size", "-1 or at least 1", "0", id="groups of none"),
    pytest.param(
        GPTQ, {"group_size": -2}, "group_size", "greater than or equal to -1", "-2", id="groups of -2"
    ),
    pytest.param(GPTQ, {"group_size": "128"}, "group_size", "integer", "'128'", id="group_size as text"),
    pytest.param(GPTQ, {"group_size": None}, "group_size", "integer", "nothing", id="group_size null"),
    pytest.param(GPTQ, {"desc_act": "yes"}, "desc_act", "boolean", "'yes'", id="desc_act as text"),
    pytest.param(GPTQ, {"sym": 1}, "sym", "boolean", "1", id="sym as a number"),
    pytest.param(GPTQ, {"pack_dtype": "int8"}, "pack_dtype", "'int32'", "'int8'", id="words of bytes"),
    pytest.param(GPTQ, {"quant_method": ...}, "quant_method", "the name of", "nothing", id="method missing"),
    pytest.param(GPTQ, {"quant_method": 4}, "quant_method", "the name of", "4", id="method as a number"),
    pytest.param(GPTQ, {"method": "awq"}, "method", "'gptq' as in quant_method", "'awq'", id="two methods"),
    pytest.param(
        {**GPTQ, "checkpoint_format": "gptq"},
        {"format": "gptq_v2"},
        "format",
        "'gptq' as in checkpoint_format",
        "'gptq_v2'",
        id="two zero-point conventions",
    ),
    pytest.param(GPTQ, {"dynamic": ["x"]}, "dynamic", "dictionary", "['x']", id="dynamic rules as a list"),
    pytest.param(
        GPTQ,
        {"modules_to_not_convert": "lm_head"},
        "modules_to_not_convert",
        "list",
        "'lm_head'",
        id="modules",
    ),
    pytest.param(AWQ, {"bits": 3}, "bits", "4 or 8", "3", id="AWQ of 3 bits"),
    pytest.param(AWQ, {"w_bit": 8}, "w_bit", "4 as in bits", "8", id="AWQ of two widths"),
    pytest.param(AWQ, {"group_size": ...}, "group_size", "a value", "nothing", id="AWQ group_size missing"),
    pytest.param(AWQ, {"version": 2}, "version", "string", "2", id="AWQ version as a number"),
]


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(("base", "change", "key", "expected", "got"), MALFORMED)
def test_a_malformed_config_is_refused_by_file_key_and_value(
    base: dict[str, Any], change: dict[str, Any], key: str, expected: str, got: str
) -> None:
    changed = {**base, **change}
    config = {name: value for name, value in changed.items() if value is not ...}

    with pytest.raises(ConfigError) as caught:
        read_claims(FoundConfig("config.json", "quantization_config", config))

    assert (caught.value.file, caught.value.key.split(".")[1]) == ("config.json", key)
    assert expected in caught.value.expected
    assert caught.value.got == got


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    "key", ["quant_method", "bits", "sym", "dynamic", "modules_to_not_convert", "format"]
)
def test_a_value_of_any_depth_is_refused_in_few_words(key: str) -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]

    with pytest.raises(ConfigError) as caught:
        loader_from_config({**GPTQ, key: value})

    assert len(str(caught.value)) < 300


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("base", "key"), [(GPTQ, "checkpoint_format"), (GPTQ, "format"), (AWQ, "version")], ids=str
)
def test_a_variant_of_no_name_is_not_the_usual_one(base: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_config.{key}\n  expected String should have"):
        loader_from_config({**base, key: ""})


def test_dynamic_rules_may_be_switched_off() -> None:
    assert loader_from_config({**GPTQ, "dynamic": False}).formats[0].config == GPTQConfig(4, 128)


@pytest.mark.usefixtures("seen_texts")
def test_a_dynamic_rule_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        loader_from_config({**GPTQ, "dynamic": {"-:lm_head": 3}})

    assert caught.value.key == "quantization_config.dynamic.-:lm_head"


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize("config", [[GPTQ], "gptq", 4])
def test_a_config_that_is_no_mapping_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="a mapping or None"):
        loader_from_config(config)


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("config", "name"),
    [({"quant_method": name}, name) for name in ("vptq", "higgs", "foo")]
    + [
        ({**GPTQ, "checkpoint_format": "gptq_p"}, "gptq_p"),
        ({**GPTQ, "checkpoint_format": "gptq_p", "bits": 6}, "gptq_p"),  # bits outside every reader of gptq
        ({**AWQ, "version": "gemv"}, "awq_gemv"),
        ({**AWQ, "version": "GEMV_FAST"}, "awq_gemv_fast"),
        ({**AWQ, "version": "marlin"}, "awq_marlin"),
        ({**AWQ, "backend": "llm-awq"}, "llm-awq"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_read_is_refused_by_name(config: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedFormatError) as caught:
        loader_from_config(config)

    assert caught.value.format == name
    assert str(caught.value).startswith(f"{name}: not read by this qload\n  reason   ")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4) | st.just("gptq"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(
    base=st.sampled_from([GPTQ, AWQ]),
    change=st.dictionaries(
        st.sampled_from([*GPTQ, *AWQ, "format", "dynamic", "w_bit", "method"]), ANY, max_size=3
    ),
    lost=st.sets(st.sampled_from([*GPTQ, *AWQ]), max_size=2),
)
@at_most(300)
def test_a_changed_config_is_understood_or_refused_and_nothing_else(
    base: dict[str, Any], change: dict[str, Any], lost: set[str]
) -> None:
    config = {name: value for name, value in {**base, **change}.items() if name not in lost}
    try:
        formats = loader_from_config(config).formats
    except QloadError:
        return

    assert formats[0].config.bits == config.get("bits", config.get("w_bit"))
