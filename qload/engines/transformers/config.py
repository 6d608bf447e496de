"""`QloadConfig`: transformers' `quantization_config` of models that qload loads."""

from collections.abc import Mapping
from typing import Any, Self

from transformers.utils.quantization_config import QuantizationConfigMixin

from qload.detect import KernelTarget, Target
from qload.errors import ArgumentError, check_type
from qload.experts import ExpertFacts
from qload.kernels.declared import Activations
from qload.loader.layer_values import check_nonfinite
from qload.loader.source import Nonfinite
from qload.methods.checkpoint_linear import LinearFactory
from qload.methods.layers import ExpertsFactory
from qload.quantize import Quantizer
from qload.quantize.policy import Modules, Policy

METHOD = "qload"
PLAIN_HEAD = Modules(without=("lm_head",))


class QloadConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Options of qload's loading, as transformers' `quantization_config`.

    ArgumentError for values of other types.

    Parameters
    ----------
    quantizer
        Quantizer of plain linear layers and experts while they are loaded, such as `Fp8Quantizer()`,
        `BNB4Quantizer("nf4")`, `BNBInt8Quantizer()` or `EETQQuantizer()`. None: no layer is quantized by the
        load, and stored quantized layers stay quantized.
    policy
        Layers to quantize, by their names in the checkpoint; None: all but `lm_head`. Routers, embeddings and
        a head tied to them always stay plain.
    target
        Kernel that weights are repacked for, as in `open_checkpoint`.
    activations
        "declared": inputs are quantized if the checkpoint declares it; "unquantized": never.
    nonfinite
        Handling of scales that are NaN or infinite, as in `open_checkpoint`.
    facts
        Computation inside the experts, for kernels of experts whose class has a gate of its own;
        ArgumentError if config or class contradict it. None: as they say, or by the class itself.
    make, make_experts
        Factories of the modules of layers, as in `qload.models.load_model`. None: `get_linear` of either.
    checkpoint
        The checkpoint's own `quantization_config`, for readers of the model's config; qload reads the files.
    options
        Settings of other versions, which are ignored.

    Examples
    --------
    >>> from qload import Fp8Quantizer
    >>> from qload.engines.transformers import QloadConfig
    >>> QloadConfig(Fp8Quantizer()).to_dict()["quantizer"]
    "Fp8Quantizer(per='channel', block=None, activation_scale_ub=None)"
    """

    def __init__(
        self,
        quantizer: Quantizer | None = None,
        policy: Policy | None = None,
        target: Target | None = "auto",
        activations: Activations = "declared",
        nonfinite: Nonfinite = "error",
        facts: ExpertFacts | None = None,
        make: LinearFactory | None = None,
        make_experts: ExpertsFactory | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_type("quantizer", quantizer, Quantizer | None)
        check_type("policy", policy, Policy | None)
        check_type("target", target, str | KernelTarget | None)
        if activations not in ("declared", "unquantized"):
            raise ArgumentError("activations", "'declared' or 'unquantized'", repr(activations))
        check_nonfinite(nonfinite)
        check_type("facts", facts, ExpertFacts | None)
        self.quant_method = METHOD
        self.quantizer: Quantizer | None = quantizer
        self.policy: Policy = PLAIN_HEAD if policy is None else policy
        self.target: Target | None = target
        self.activations: Activations = activations
        self.nonfinite: Nonfinite = nonfinite
        self.facts: ExpertFacts | None = facts
        self.make: LinearFactory | None = make
        self.make_experts: ExpertsFactory | None = make_experts
        self.checkpoint: Mapping[str, Any] | None = checkpoint

    @classmethod
    def of_checkpoint(cls, section: Mapping[str, Any], **options: Any) -> Self:
        """Create a config for a checkpoint with this `quantization_config`; `options`: further options."""
        return cls(checkpoint=dict(section), **options)

    def to_dict(self) -> dict[str, Any]:
        """Return a quantized checkpoint's own section; else all settings, with the repr of objects."""
        if self.quantizer is None and self.checkpoint is not None:
            return dict(self.checkpoint)
        plain = (str, int, float, bool, type(None))
        settings: dict[str, Any] = {
            key: value if isinstance(value, plain) else repr(value) for key, value in vars(self).items()
        }
        settings["checkpoint"] = None if self.checkpoint is None else dict(self.checkpoint)
        if self.quantizer is None:
            del settings["policy"]
        return settings

    def get(self, key: str, default: Any = None) -> Any:
        """Return a setting by its name, as transformers reads the config of a model."""
        return vars(self).get(key, default)

    def as_section(self) -> dict[str, Any]:
        """Return the settings as a dict, the form that a model's config may have in place of this object."""
        return {key: value for key, value in vars(self).items() if value is not None}
