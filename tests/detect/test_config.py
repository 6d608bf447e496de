"""Configs are hostile input: read as they are meant, or refused by file and key; none becomes a default."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qload.detect import FoundConfig, find_config, find_configs, loader_from_config, read_claims, settle
from qload.errors import ConfigError, QloadError, UnsupportedFormatError
from qload.formats import AWQConfig, GPTQConfig
from qload.layouts import STORED_MINUS_ONE, Stored
from qload.storage import MemoryStorage
from tests.example_counts import at_most

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def write(folder: Path, name: str, content: Any) -> Path:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).write_bytes(text)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "method", "section"),
    [
        pytest.param(
            "config.json", {"quantization_config": GPTQ}, "gptq", "quantization_config", id="at the top"
        ),
        pytest.param(
            "config.json",
            {"text_config": {"quantization_config": AWQ}},
            "awq",
            "text_config.quantization_config",
            id="in the text model's",
        ),
        pytest.param(
            "quantize_config.json",
            {k: v for k, v in GPTQ.items() if k != "quant_method"},
            "gptq",
            "",
            id="GPTQ's own",
        ),
        pytest.param(
            "quantize_config.json",
            {"bits": 4, "group_size": 64, "version": "GEMM"},
            "awq",
            "",
            id="AWQ in GPTQ's file",
        ),
        pytest.param(
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"},
            "awq",
            "",
            id="AWQ's own, without desc_act",
        ),
    ],
)
def test_a_config_is_found_where_tools_write_it(
    name: str, content: Any, method: str, section: str, tmp_path: Path
) -> None:
    found = find_config(write(tmp_path, name, content))

    assert found is not None
    assert (found.file, found.section) == (name, section)
    assert (read_claims(found).method, read_claims(found).bits) == (method, 4)


def test_a_tools_own_file_that_could_be_any_tools_is_refused(tmp_path: Path) -> None:
    found = find_config(write(tmp_path, "quantize_config.json", {"bits": 4, "group_size": 64}))

    assert found is not None
    with pytest.raises(ConfigError, match=r"^quantize_config\.json: quant_method\n  expected the name of"):
        read_claims(found)


def test_config_json_counts_before_the_tools_own_files(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"quantization_config": AWQ})
    write(tmp_path, "quantize_config.json", GPTQ)

    assert [found.file for found in find_configs(tmp_path)] == ["config.json", "quantize_config.json"]


@pytest.mark.parametrize("content", [{}, {"quantization_config": None}, {"text_config": {}}])
def test_a_model_without_a_quantization_config_is_plain(content: Any, tmp_path: Path) -> None:
    assert find_config(write(tmp_path, "config.json", content)) is None
    assert [fmt.weight_type.format for fmt in loader_from_config(None).formats] == ["unquantized"]


def test_a_config_without_its_model_config_is_found_beside_a_file(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"quantization_config": GPTQ})

    assert find_config(tmp_path / "model.safetensors") is not None


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


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(b"{", "JSONDecodeError", id="half an object"),
        pytest.param(b"[]", "list", id="a list"),
        pytest.param(b'{"a": NaN}', "NaN is not JSON", id="NaN"),
        pytest.param(b"\xff\xfe\x00", "Error", id="not UTF-8"),
        pytest.param(b'{"a":' + b"[" * 200_000, "RecursionError", id="a nesting bomb"),
        pytest.param({"quantization_config": [GPTQ]}, "list", id="a list of configs"),
        pytest.param({"quantization_config": "gptq"}, "str 'gptq'", id="a config of text"),
        pytest.param({"text_config": 3}, "int", id="a text_config that is a number"),
        pytest.param(
            {"quantization_config": GPTQ, "text_config": {"quantization_config": AWQ}},
            "another",
            id="two configs",
        ),
    ],
)
def test_a_config_file_that_is_none_is_refused(content: Any, text: str, tmp_path: Path) -> None:
    write(tmp_path, "config.json", content)

    with pytest.raises(ConfigError, match=r"^config\.json: ") as caught:
        find_config(tmp_path)

    assert text in caught.value.got


CONFIGS = ["config.json", "quantize_config.json", "quant_config.json"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_a_directory_is_not_taken_for_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()

    with pytest.raises(ConfigError, match=f"^{name}: file\n  expected a file\n  got      a directory"):
        find_config(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_a_broken_link_is_not_taken_for_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("blobs/gone")

    with pytest.raises(ConfigError, match=f"^{name}: file\n  expected a file\n  got      a link to nothing"):
        find_config(tmp_path)


def test_a_config_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(5 << 30)

    with pytest.raises(ConfigError, match=r"^config\.json: size\n  expected at most 67108864 bytes"):
        find_config(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_json_in_any_encoding_of_unicode_is_read(encoding: str, tmp_path: Path) -> None:
    write(tmp_path, "config.json", json.dumps({"quantization_config": GPTQ}).encode(encoding))

    assert find_config(tmp_path) == FoundConfig("config.json", "quantization_config", GPTQ)


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


@pytest.mark.parametrize(
    ("base", "key"), [(GPTQ, "checkpoint_format"), (GPTQ, "format"), (AWQ, "version")], ids=str
)
def test_a_variant_of_no_name_is_not_the_usual_one(base: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_config.{key}\n  expected String should have"):
        loader_from_config({**base, key: ""})


def test_dynamic_rules_may_be_switched_off() -> None:
    assert loader_from_config({**GPTQ, "dynamic": False}).formats[0].config == GPTQConfig(4, 128)


def test_a_dynamic_rule_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        loader_from_config({**GPTQ, "dynamic": {"-:lm_head": 3}})

    assert caught.value.key == "quantization_config.dynamic.-:lm_head"


@pytest.mark.parametrize("config", [[GPTQ], "gptq", 4])
def test_a_config_that_is_no_mapping_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="a mapping or None"):
        loader_from_config(config)


@pytest.mark.parametrize(
    ("config", "name"),
    [({"quant_method": name}, name) for name in ("hqq", "quanto", "foo")]
    + [
        ({**GPTQ, "checkpoint_format": "gptq_p"}, "gptq_p"),
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


def test_another_tools_config_alone_is_not_taken_for_a_plain_model(tmp_path: Path) -> None:
    write(tmp_path, "hf_quant_config.json", {"quantization": None})

    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization\n  expected an object"):
        find_config(tmp_path)


# Settings that old GPTQ checkpoints keep in tensors


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("config", [None, GPTQ], ids=["no config", "a config that differs"])
def test_settings_in_tensors_are_believed(dtype: torch.dtype, shape: tuple[int, ...], config: Any) -> None:
    storage = MemoryStorage(
        {
            "gptq_bits": torch.full(shape, 8).to(dtype),
            "gptq_groupsize": torch.full(shape, -1).to(dtype),
        }
    )

    loader = loader_from_config(config, storage)

    assert loader.formats[0].config == GPTQConfig(8, -1, STORED_MINUS_ONE)
    assert loader.config_tensors == ("gptq_bits", "gptq_groupsize")


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        pytest.param({"gptq_bits": torch.tensor(4)}, None, id="no group size"),
        pytest.param(
            {"gptq_bits": torch.tensor([4, 4]), "gptq_groupsize": torch.tensor(8)}, None, id="two values"
        ),
        pytest.param(
            {"gptq_bits": torch.tensor(4.5), "gptq_groupsize": torch.tensor(8)}, None, id="a fraction"
        ),
        pytest.param(
            {"gptq_bits": torch.tensor(float("nan")), "gptq_groupsize": torch.tensor(8)}, None, id="NaN"
        ),
        pytest.param(
            {"gptq_bits": torch.tensor(7), "gptq_groupsize": torch.tensor(8)}, None, id="seven bits"
        ),
        pytest.param(
            {"gptq_bits": torch.tensor(4), "gptq_groupsize": torch.tensor(0)}, None, id="groups of none"
        ),
        pytest.param(
            {"gptq_bits": torch.tensor(4 + 0j), "gptq_groupsize": torch.tensor(8)}, None, id="complex"
        ),
        pytest.param(
            {"gptq_bits": torch.tensor(1 << 40), "gptq_groupsize": torch.tensor(8)}, None, id="40 bits long"
        ),
        pytest.param(
            {"gptq_bits": torch.tensor(4), "gptq_groupsize": torch.tensor(1 << 31)}, None, id="32 bits long"
        ),
    ],
)
def test_settings_in_tensors_that_are_none_are_refused(tensors: Any, config: Any) -> None:
    with pytest.raises(ConfigError, match="gptq_"):
        loader_from_config(config, MemoryStorage(tensors))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"bits": 8, "group_size": 16}, False),
        ({"bits": 4, "group_size": 16}, True),
        ({"bits": 8, "group_size": 8}, True),
        ({"bits": 8, "group_size": 32}, True),
    ],
)
def test_a_config_that_says_otherwise_is_told_of(
    said: dict[str, int], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = {"gptq_bits": torch.tensor(8), "gptq_groupsize": torch.tensor(16)}

    loader_from_config({**GPTQ, **said}, MemoryStorage(tensors))

    line = (
        f"claims {said['bits']} bits, group size {said['group_size']}; gptq_bits and gptq_groupsize say 8, 16"
    )
    assert [line in message for message in caplog.messages] == [True] * told


def test_of_a_config_of_awq_beside_tensors_of_gptq_one_line_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loader_from_config(AWQ, MemoryStorage({"gptq_bits": torch.tensor(8), "gptq_groupsize": torch.tensor(-1)}))

    (message,) = caplog.messages
    assert "claims awq; there is a tensor gptq_bits, which is believed: gptq" in message


def test_a_weight_of_mlx_is_known_without_biases_where_a_config_claims_groups() -> None:
    tensors = {"a.weight": torch.zeros(4, 4, dtype=torch.uint32), "a.scales": torch.ones(4, 1)}

    with pytest.raises(UnsupportedFormatError, match="MLX"):
        loader_from_config({"bits": 4, "group_size": 32}, MemoryStorage(tensors))


def test_settings_in_tensors_are_those_of_gptq_whatever_the_config_says() -> None:
    tensors = {"gptq_bits": torch.tensor(8), "gptq_groupsize": torch.tensor(-1)}
    config = {**AWQ, "modules_to_not_convert": ["lm_head"]}

    loader = loader_from_config(config, MemoryStorage(tensors))

    assert loader.formats[0].config == GPTQConfig(8, -1, STORED_MINUS_ONE)
    assert loader.left_out("lm_head") == "modules_to_not_convert has 'lm_head'"
    with pytest.raises(ConfigError, match="gptq, as there is a tensor gptq_bits\n  got      fp8"):
        loader_from_config({"quant_method": "fp8"}, MemoryStorage(tensors))


def test_a_setting_that_is_a_large_tensor_is_refused_unread() -> None:
    storage = MemoryStorage({"gptq_bits": torch.zeros(1000), "gptq_groupsize": torch.tensor(8)})

    with pytest.raises(ConfigError, match=r"^gptq_bits: value\n.*\n  got      a tensor of shape \(1000,\)"):
        loader_from_config(None, storage)

    assert not storage.reads["gptq_bits"]


def test_symmetry_in_a_tensor_is_believed() -> None:
    tensors = {
        "gptq_bits": torch.tensor(4),
        "gptq_groupsize": torch.tensor(8),
        "gptq_sym": torch.tensor(True),
    }

    claims = settle(FoundConfig("config.json", "", {**GPTQ, "sym": False}), MemoryStorage(tensors))

    assert claims is not None
    assert (claims.bits, claims.group_size, claims.sym) == (4, 8, True)


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
