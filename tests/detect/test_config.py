"""Location of a config, and invalid files: an error with file and key for hostile input."""

import json
from pathlib import Path
from typing import Any

import pytest

from qload import FormatLoader, Stored
from qload.configs import FoundConfig
from qload.detect import (
    AWQWeightsLoader,
    GPTQWeightsLoader,
    MarlinWeightsLoader,
    loader_from_config,
    read_claims,
    read_configs,
    read_model_config,
)
from qload.errors import ConfigError
from tests.detect.settings import AWQ, GPTQ

pytestmark = pytest.mark.usefixtures("seen_texts")


def write(folder: Path, name: str, content: Any) -> Path:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / name).write_bytes(text)
    return folder


def first_config(path: Path) -> FoundConfig | None:
    return next(iter(read_configs(path)[1]), None)


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
    found = first_config(write(tmp_path, name, content))

    assert found is not None
    assert (found.file, found.section) == (name, section)
    assert (read_claims(found).method, read_claims(found).bits) == (method, 4)


def test_a_tools_own_file_that_could_be_any_tools_is_refused(tmp_path: Path) -> None:
    found = first_config(write(tmp_path, "quantize_config.json", {"bits": 4, "group_size": 64}))

    assert found is not None
    with pytest.raises(ConfigError, match=r"^quantize_config\.json: quant_method\n  expected the name of"):
        read_claims(found)


def test_config_json_counts_before_the_tools_own_files(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"quantization_config": AWQ})
    write(tmp_path, "quantize_config.json", GPTQ)

    assert [found.file for found in read_configs(tmp_path)[1]] == ["config.json", "quantize_config.json"]


@pytest.mark.parametrize("content", [{}, {"quantization_config": None}, {"text_config": {}}])
def test_a_model_without_a_quantization_config_is_plain(content: Any, tmp_path: Path) -> None:
    assert first_config(write(tmp_path, "config.json", content)) is None
    assert [fmt.weight_type.format for fmt in loader_from_config(None).formats] == ["unquantized"]


def test_a_config_without_its_model_config_is_found_beside_a_file(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"quantization_config": GPTQ})

    assert first_config(tmp_path / "model.safetensors") is not None


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
        read_configs(tmp_path)

    assert text in caught.value.got


CONFIGS = ["config.json", "quantize_config.json", "quant_config.json"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_a_directory_is_not_taken_for_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()

    with pytest.raises(ConfigError, match=f"^{name}: file\n  expected a file\n  got      a directory"):
        read_configs(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_is_a_broken_link_is_not_taken_for_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("blobs/gone")

    with pytest.raises(ConfigError, match=f"^{name}: file\n  expected a file\n  got      a link to nothing"):
        read_configs(tmp_path)


def test_a_config_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(5 << 30)

    with pytest.raises(ConfigError, match=r"^config\.json: size\n  expected at most 67108864 bytes"):
        read_configs(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_json_in_any_encoding_of_unicode_is_read(encoding: str, tmp_path: Path) -> None:
    write(tmp_path, "config.json", json.dumps({"quantization_config": GPTQ}).encode(encoding))

    assert first_config(tmp_path) == FoundConfig("config.json", "quantization_config", GPTQ)


def test_another_tools_config_alone_is_not_taken_for_a_plain_model(tmp_path: Path) -> None:
    write(tmp_path, "hf_quant_config.json", {"quantization": None})

    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: quantization\n  expected an object"):
        read_configs(tmp_path)


def test_the_config_of_a_model_is_beside_its_file(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "other").mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"")

    assert read_model_config(tmp_path) == read_model_config(tmp_path / "model.safetensors") == config
    assert read_model_config(tmp_path / "other") == {}


LOADERS = [
    pytest.param(AWQWeightsLoader(group_size=64), AWQ | {"group_size": 64}, id="AWQ by default"),
    pytest.param(
        AWQWeightsLoader(group_size=32, bits=8, zero_point=False),
        AWQ | {"bits": 8, "group_size": 32, "zero_point": False},
        id="AWQ",
    ),
    pytest.param(
        MarlinWeightsLoader(group_size=128),
        {"quant_method": "marlin", "bits": 4, "group_size": 128},
        id="Marlin by default",
    ),
    pytest.param(
        MarlinWeightsLoader(group_size=-1, bits=8, is_marlin_24=True),
        GPTQ | {"checkpoint_format": "marlin_24", "bits": 8, "group_size": -1},
        id="sparse Marlin",
    ),
    pytest.param(
        GPTQWeightsLoader(bits=3, group_size=64),
        {"quant_method": "gptq", "bits": 3, "group_size": 64},
        id="GPTQ by default",
    ),
    pytest.param(
        GPTQWeightsLoader(bits=8, group_size=64, zeros=Stored(), desc_act=True),
        GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": 64, "desc_act": True},
        id="GPTQ",
    ),
]


@pytest.mark.parametrize(("loader", "section"), LOADERS)
def test_the_settings_of_a_loader_are_those_of_a_section_with_them(
    loader: FormatLoader, section: dict[str, Any]
) -> None:
    configured = loader_from_config(section)

    assert isinstance(configured, FormatLoader)
    assert [(fmt.weight_type, fmt.config) for fmt in loader.formats] == [
        (fmt.weight_type, fmt.config) for fmt in configured.formats
    ]
