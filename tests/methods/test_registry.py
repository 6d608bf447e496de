"""Methods by name, and what a config promises of itself."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from qload.methods import (
    AWQMarlinConfig,
    QuantizationConfig,
    QuantizeMethodBase,
    base,
    get_quantization_config,
    list_quantization_methods,
    register_quantization,
)

pytestmark = pytest.mark.usefixtures("seen_texts")


class Nothing(QuantizationConfig):
    """The least a config can be."""

    @classmethod
    def get_name(cls) -> str:
        return "nothing"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Nothing":
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str = "") -> None:
        return None


@pytest.fixture(autouse=True)
def methods(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registry as it is, whatever a test adds."""
    monkeypatch.setattr(base, "_CONFIGS", dict(base._CONFIGS))
    return


def test_a_config_is_found_under_the_name_it_was_registered_with() -> None:
    assert register_quantization("nothing")(Nothing) is Nothing
    assert get_quantization_config("nothing") is Nothing
    assert get_quantization_config("awq_marlin") is AWQMarlinConfig


def test_the_names_are_listed_in_order() -> None:
    register_quantization("zzz")(Nothing)
    register_quantization("a")(Nothing)

    names = list_quantization_methods()

    assert names == sorted(names)
    assert {"a", "awq_marlin", "zzz"} <= set(names)


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="'awq_marlin': AWQMarlinConfig"):
        register_quantization("awq_marlin")(Nothing)

    assert get_quantization_config("awq_marlin") is AWQMarlinConfig


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"'awq_marlim'.*\n  known .*awq_marlin"):
        get_quantization_config("awq_marlim")


def test_a_config_supports_everything_unless_it_says_otherwise() -> None:
    config = Nothing()

    assert config.get_supported_act_dtypes() == [torch.float16, torch.bfloat16, torch.float32]
    assert config.get_min_capability() == 0
    assert config.get_config_filenames() == ["quantize_config.json"]


@pytest.mark.parametrize("base", [QuantizationConfig, QuantizeMethodBase], ids=lambda base: base.__name__)
def test_what_has_to_be_said_has_no_default(base: type[Any]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base()


def test_a_method_may_have_no_weights_to_create_or_process() -> None:
    class Scale(QuantizeMethodBase):
        def apply(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    layer = nn.Module()
    Scale().create_weights(layer, 3)
    Scale().process_weights_after_loading(layer)

    assert Scale().apply(layer, torch.ones(1)).tolist() == [2]
    assert not list(layer.parameters())
