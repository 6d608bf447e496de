"""What a checkpoint declares of inputs is logged once for all of its layers, and not of those without."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload import MemoryStorage, Weights, load_layers, loader_from_config, verify
from qload.methods import get_quantization_config
from qload.testing import make_checkpoint

pytestmark = pytest.mark.usefixtures("seen_logs")

K, N = 64, 32
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
SCHEMES = {"dynamic": "float8 token dynamic", "static": "float8 tensor static"}


def tensors(prefix: str, scheme: str) -> dict[str, Tensor]:
    held = {"weight": torch.ones(N, K).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}
    held |= {"input_scale": torch.tensor(2.0)} if scheme == "static" else {}
    return {f"{prefix}.{name}": each for name, each in held.items()}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "declares quantized inputs" in record.message]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("target", [None, "auto"])
def test_a_scheme_is_logged_once_for_a_checkpoint(
    scheme: str, target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stored = {name: each for prefix in "abc" for name, each in tensors(prefix, scheme).items()}
    for _ in range(2):
        loader = loader_from_config({**FP8, "activation_scheme": scheme}, target=target)
        weights = Weights(MemoryStorage(stored), loader=loader)
        with caplog.at_level(logging.INFO, "qload"):
            caplog.clear()
            for _, weight in load_layers(weights):
                weight.get_linear()
            weights.get_weights("a")

        (text,) = told(caplog)
        assert text.startswith("a and layers like it: ")
        assert SCHEMES[scheme] in text
        assert 'activations="unquantized" takes x as it comes' in text


def test_nothing_is_logged_where_nothing_is_declared(caplog: pytest.LogCaptureFixture) -> None:
    weights = Weights(
        MemoryStorage(tensors("a", "dynamic")), loader=loader_from_config({"quant_method": "fp8"})
    )
    plain = Weights(MemoryStorage({"a.weight": torch.ones(N, K)}), loader=loader_from_config(None))
    with caplog.at_level(logging.INFO, "qload"):
        scheme = weights.get_weights("a").activations
        plain.get_weights("a")

    assert len(told(caplog)) == (scheme is not None)


def test_layers_that_an_engine_fills_log_it_once(caplog: pytest.LogCaptureFixture) -> None:
    config: Any = get_quantization_config("fp8").from_config(FP8)
    config.target = None
    with caplog.at_level(logging.INFO, "qload"):
        for prefix in "ab":
            layer: Any = nn.Module()
            method = config.get_quant_method(_linear(), prefix)
            method.create_weights(layer, K, [N], K, N, torch.float32)
            for name, tensor in tensors(prefix, "dynamic").items():
                method.load(layer, name.removeprefix(f"{prefix}."), tensor)
            method.process_weights_after_loading(layer)

    assert len(told(caplog)) == 1


def _linear() -> Any:
    from qload.methods import ReplicatedLinear

    return ReplicatedLinear(K, N, bias=False, params_dtype=torch.float32)


def test_a_report_logs_none(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    make_checkpoint("fp8-block", tmp_path / "model")
    with caplog.at_level(logging.INFO, "qload"):
        verify(tmp_path / "model")

    assert not told(caplog)
