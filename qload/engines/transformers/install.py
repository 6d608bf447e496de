"""Plain `from_pretrained` on qload: ours in the tables by which transformers finds who loads a checkpoint."""

from collections.abc import Mapping
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from qload.detect import Target
from qload.detect.config_reader import METHODS
from qload.engines.transformers.config import METHOD, QloadConfig
from qload.engines.transformers.quantizer import QloadQuantizer
from qload.experts import ExpertFacts
from qload.kernels.declared import Activations
from qload.loader.finite_scales import Nonfinite

# transformers has two names for bitsandbytes, by a flag.
READ = (*METHODS, "bitsandbytes_4bit", "bitsandbytes_8bit")

_before: dict[str, Any] = {}
_MISSING = object()


def register() -> None:
    """Make the method "qload" known to transformers, beside its own."""
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, QloadConfig)
    AUTO_QUANTIZER_MAPPING.setdefault(METHOD, QloadQuantizer)


def install(
    *,
    target: Target | None = "auto",
    activations: Activations = "declared",
    nonfinite: Nonfinite = "error",
    facts: ExpertFacts | None = None,
) -> None:
    """From here on transformers' `from_pretrained` loads every quantized checkpoint by qload.

    Of those whose `config.json` says that they are quantized, and by a method that qload reads; `load` takes
    also those of tools that say so in a file of their own. A second call replaces the first.

    Parameters
    ----------
    target, activations, nonfinite, facts
        Those of `QloadConfig`.
    """
    settings: dict[str, Any] = {
        "target": target,
        "activations": activations,
        "nonfinite": nonfinite,
        "facts": facts,
    }
    QloadConfig(**settings)  # refused here, not when a model is loaded
    uninstall()

    class Installed(QloadConfig):
        """The config of a checkpoint, with the settings of `install`."""

        @classmethod
        def from_dict(cls, section: Mapping[str, Any], *rest: Any, **options: Any) -> Any:
            """The config for a checkpoint whose own section this is."""
            return QloadConfig.of_checkpoint(section, **settings)

    for method in READ:
        _before[method] = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method, _MISSING)
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = Installed


def uninstall() -> None:
    """Undo `install`: transformers' own loaders are back, and nothing else of it was changed."""
    for method, own in _before.items():
        if own is _MISSING:
            del AUTO_QUANTIZATION_CONFIG_MAPPING[method]
        else:
            AUTO_QUANTIZATION_CONFIG_MAPPING[method] = own
    _before.clear()


register()
