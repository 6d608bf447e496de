"""The model that a config describes, by which its layers are shared."""

from collections.abc import Mapping

from qload.architecture import architecture_of
from qload.errors import ConfigError
from qload.models import FAMILIES
from qload.models.config import TextConfig, text_config

USUAL = "layers are cut as is usual by the last part of their names"


def described_model(config: Mapping[str, object]) -> tuple[TextConfig | None, str]:
    """The model, as `load_model` makes it, and ""; or None, and a note that says why there is none."""
    try:
        known = architecture_of(config)
        if known is None or known.type not in FAMILIES:
            return None, f"no model of qload's has this type: {USUAL}"
        return text_config(config), ""
    except ConfigError as error:
        said = f"{error.file}: {error.key}, expected {error.expected}, got {error.got}"
        return None, f"load_model refuses this model ({said}): {USUAL}"
