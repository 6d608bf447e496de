"""What vLLM hands over as a checkpoint's quantization: a section of its config, or a file of a tool's own."""

from collections.abc import Mapping
from typing import Any

from qload.detect.config_reader import method_of_own_file
from qload.errors import ConfigError

SETTINGS = ("target", "activations", "nonfinite")


def section_and_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The section as `qload.loader_from_config` takes it, and those of `SETTINGS` that are said.

    `hf_quant_config.json` is ModelOpt's and has the section inside; `quantize_config.json` and
    `quant_config.json` need not name their method, which their keys tell. ConfigError for a `qload` that is
    not an object with these settings.
    """
    values = dict(config)
    settings = values.pop("qload", {})
    if not isinstance(settings, Mapping) or not set(settings) <= {*SETTINGS}:
        wanted = f"an object with {' and '.join(SETTINGS)}"
        raise ConfigError("config", "quantization_config.qload", wanted, repr(settings))
    inside = values.get("quantization")
    if isinstance(inside, Mapping):
        values = {"quant_method": "modelopt", **inside}
    unsaid = all(values.get(key) is None for key in ("quant_method", "method", "config_groups"))
    method = method_of_own_file(values) if unsaid else None
    return values if method is None else {**values, "quant_method": method}, dict(settings)
