"""Settings of old GPTQ checkpoints in tensors: accepted, noted, or an error."""

from typing import Any

import pytest
import torch

from qload.configs import FoundConfig
from qload.detect import effective_claims, loader_from_config
from qload.errors import ConfigError, MissingTensorError
from qload.formats import GPTQConfig
from qload.layouts import STORED_MINUS_ONE
from qload.storage import MemoryStorage
from qload.weights import Weights
from tests.detect.settings import AWQ, GPTQ

pytestmark = pytest.mark.usefixtures("seen_texts", "seen_logs")


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
            {"gptq_bits": torch.tensor(4), "gptq_groupsize": torch.tensor(8)},
            {**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}},
            id="rules for modules",
        ),
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
    storage = MemoryStorage({"a.weight": torch.zeros(4, 4, dtype=torch.uint32), "a.scales": torch.ones(4, 1)})
    loader = loader_from_config({"bits": 4, "group_size": 32}, storage)

    with pytest.raises(MissingTensorError, match=r"a\.biases"):
        Weights(storage, loader=loader).get_weights("a")


def test_settings_in_tensors_are_those_of_gptq_whatever_the_config_says() -> None:
    tensors = {"gptq_bits": torch.tensor(8), "gptq_groupsize": torch.tensor(-1)}
    config = {**AWQ, "modules_to_not_convert": ["lm_head"]}

    loader = loader_from_config(config, MemoryStorage(tensors))

    assert loader.formats[0].config == GPTQConfig(8, -1, STORED_MINUS_ONE)
    assert loader.left_out("lm_head") == "modules_to_not_convert has 'lm_head'"
    with pytest.raises(ConfigError, match="gptq, because of the tensor gptq_bits\n  got      fp8"):
        loader_from_config({"quant_method": "fp8"}, MemoryStorage(tensors))


def test_a_setting_that_is_a_large_tensor_is_refused_unread() -> None:
    storage = MemoryStorage({"gptq_bits": torch.zeros(1000), "gptq_groupsize": torch.tensor(8)})

    with pytest.raises(ConfigError, match=r"^gptq_bits: value\n.*\n  got      a tensor of shape \(1000,\)"):
        loader_from_config(None, storage)

    assert not storage.reads["gptq_bits"]


@pytest.mark.parametrize("size", [-1, 1, 128, 2**31 - 1])
def test_a_group_size_in_a_tensor_is_any_of_31_bits(size: int) -> None:
    tensors = {"gptq_bits": torch.tensor(8), "gptq_groupsize": torch.tensor(size)}

    assert loader_from_config(None, MemoryStorage(tensors)).formats[0].config == GPTQConfig(
        8, size, STORED_MINUS_ONE
    )


def test_symmetry_in_a_tensor_is_believed() -> None:
    tensors = {
        "gptq_bits": torch.tensor(4),
        "gptq_groupsize": torch.tensor(8),
        "gptq_sym": torch.tensor(True),
    }

    claims = effective_claims(FoundConfig("config.json", "", {**GPTQ, "sym": False}), MemoryStorage(tensors))

    assert claims is not None
    assert (claims.bits, claims.group_size, claims.sym) == (4, 8, True)
