"""`QloadConfig`: what `from_pretrained` is handed for qload to load a checkpoint."""

from collections.abc import Mapping
from typing import Any, Self

from transformers.utils.quantization_config import QuantizationConfigMixin

from qload.detect import KernelTarget, Target
from qload.errors import ArgumentError, check_type
from qload.experts import ExpertFacts
from qload.kernels.declared import Activations
from qload.loader.finite_scales import Nonfinite, check_nonfinite
from qload.quantize import Quantizer
from qload.quantize.policy import Modules, Policy

METHOD = "qload"
PLAIN_HEAD = Modules(without=("lm_head",))


class QloadConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How qload loads the layers of a model, as transformers' `quantization_config`.

    ArgumentError for values of other types.

    Parameters
    ----------
    quantizer
        What plain linear layers and experts are quantized by while they are loaded, such as
        `Fp8Quantizer()`, `BNB4Quantizer("nf4")`, `BNBInt8Quantizer()` or `EETQQuantizer()`. None: nothing is,
        and what the checkpoint stores quantized stays so.
    policy
        Which layers are quantized, by the names that the checkpoint has for them; None: all but `lm_head`.
        Routers, embeddings and a head that is tied to them stay plain whatever it says.
    target
        What weights are repacked for, as in `open_checkpoint`.
    activations
        "declared": inputs are quantized where the checkpoint declares it; "unquantized": never.
    nonfinite
        What becomes of scales that are NaN or infinite, as in `open_checkpoint`.
    facts
        What experts do between their matrices, for a model whose config and class do not tell; ArgumentError
        where they tell otherwise. None: only what they tell.
    checkpoint
        The checkpoint's own `quantization_config`, for who reads the model's config; qload reads the files.
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
        self.checkpoint: Mapping[str, Any] | None = checkpoint

    @classmethod
    def of_checkpoint(cls, section: Mapping[str, Any], **options: Any) -> Self:
        """For a checkpoint whose own `quantization_config` is `section`; `options`: further ones of ours."""
        return cls(checkpoint=dict(section), **options)

    def to_dict(self) -> dict[str, Any]:
        """A quantized checkpoint's own section; else all settings, objects by their words."""
        if self.quantizer is None and self.checkpoint is not None:
            return dict(self.checkpoint)
        plain = (str, int, float, bool, type(None))
        made: dict[str, Any] = {
            key: value if isinstance(value, plain) else repr(value) for key, value in vars(self).items()
        }
        unused = ("policy",) if self.quantizer is None else ()
        made |= {"checkpoint": None if self.checkpoint is None else dict(self.checkpoint)}
        return {key: value for key, value in made.items() if key not in unused}

    def get(self, key: str, default: Any = None) -> Any:
        """A setting by its name, as transformers asks the section of a config that a model already has."""
        return vars(self).get(key, default)

    def as_section(self) -> dict[str, Any]:
        """The same as the dict that a model's config may hold in lieu of an object."""
        return {key: value for key, value in vars(self).items() if value is not None}
