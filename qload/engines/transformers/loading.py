"""`load`: a model of transformers from any checkpoint that qload reads."""

from collections.abc import Mapping
from copy import copy
from os import PathLike
from typing import Any

import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

from qload.detect import Target
from qload.engines.transformers.config import METHOD, QloadConfig
from qload.engines.transformers.files import FOUND, NAME, folder_and_files, named_files
from qload.engines.transformers.install import register
from qload.errors import ArgumentError, MissingTensorError, check_type
from qload.experts import ExpertFacts
from qload.kernels.declared import Activations
from qload.kernels.dtypes import DTYPES
from qload.loader.finite_scales import Nonfinite

SHOWN = 5  # names in a message


def load(
    path: str | PathLike[str],
    *,
    target: Target | None = "auto",
    activations: Activations = "declared",
    nonfinite: Nonfinite = "error",
    facts: ExpertFacts | None = None,
    dtype: torch.dtype | str | None = None,
    device_map: Any = None,
    tp_plan: Any = None,
    model_class: Any = None,
    quantization_config: QloadConfig | None = None,
    **options: Any,
) -> Any:
    """The model of a checkpoint, as transformers' `from_pretrained` makes it, its quantized layers qload's.

    Parameters
    ----------
    path
        A folder, a file or an index in one, or a model's name on the hub. Files are those that
        `open_checkpoint` finds; on the hub transformers finds them, by their usual names.
    target, activations, nonfinite, facts
        Those of `QloadConfig`.
    dtype
        Of activations and plain floats; None: as the checkpoint says.
    device_map
        As in `from_pretrained`: "auto", a device, or what goes where. Layers on "cpu" beside another device
        wait there and come for each product; ArgumentError for a quantized layer on "disk".
    tp_plan
        "auto": the ranks of torch.distributed share the model as transformers' plan for it says. CutError or
        DivideError on all of them, before a weight is read, where its format cannot be cut so.
    model_class
        Whose `from_pretrained` is called; None: the class that the config names, or `AutoModelForCausalLM`.
    quantization_config
        A `QloadConfig` whose quantizer quantizes plain layers while they are loaded, and whose `target`,
        `activations`, `nonfinite` and `facts` then count.
    options
        Further ones of `from_pretrained`.

    Raises
    ------
    ArgumentError
        For a parameter that cannot be acted on.
    MissingTensorError
        Where the checkpoint lacks a tensor of the model, which transformers alone would draw at random.
    UnreadTensorsError
        Where a tensor of the checkpoint is in a form that no format reads, before any weight is read.
    QloadError
        All that `open_checkpoint` and the loads of layers raise.
    """
    register()
    check_type("path", path, str | PathLike)
    check_type("quantization_config", quantization_config, QloadConfig | None)
    dtype = one_dtype(dtype, options.pop("torch_dtype", None))
    check_dtype(dtype)
    check_plan(tp_plan, options)
    asked = quantization_config or QloadConfig(
        target=target, activations=activations, nonfinite=nonfinite, facts=facts
    )
    names = (
        "cache_dir",
        "force_download",
        "local_files_only",
        "revision",
        "subfolder",
        "token",
        "trust_remote_code",
    )
    fetch = {name: options[name] for name in names if name in options}
    folder, files = folder_and_files(path, options)
    given = options.pop("config", None)
    config = copy(given) if given else transformers.AutoConfig.from_pretrained(folder, **fetch)
    if getattr(config, NAME, None) is None:
        setattr(config, FOUND, files)
    if tp_plan is not None:
        options["distributed_config"] = DistributedConfig(tp_plan=tp_plan)
    section = getattr(config, "quantization_config", None)
    if asked.quantizer is None:
        asked.checkpoint = section if isinstance(section, dict) else None
    config.quantization_config = {**asked.as_section(), "quant_method": METHOD}
    kind = model_class or class_of(config)
    wants_info = options.pop("output_loading_info", False)
    with named_files(path):
        model, info = kind.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype is None else dtype,
            device_map=device_map,
            output_loading_info=True,
            **options,
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise MissingTensorError(
            missing[0], missing[:SHOWN], [], f"{len(missing)} tensors of {kind.__name__}"
        )
    return (model, info) if wants_info else model


def one_dtype(dtype: Any, other: Any) -> Any:
    """What `dtype` says, or `torch_dtype`, its old name; ArgumentError where both say different things."""
    if dtype is None or other is None or dtype == other:
        return other if dtype is None else dtype
    raise ArgumentError("torch_dtype", f"{dtype}, as dtype says", str(other))


def check_dtype(dtype: Any) -> None:
    """ArgumentError where activations of `dtype`, a torch.dtype or the name of one, have no product."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype not in (None, "auto") and named not in DTYPES:
        expected = "None, 'auto', torch.float16, torch.bfloat16 or torch.float32"
        raise ArgumentError("dtype", expected, repr(dtype))


def check_plan(tp_plan: Any, options: Mapping[str, Any]) -> None:
    """ArgumentError where `tp_plan` is none, or where `options` has transformers' own way to say it too."""
    if tp_plan is None:
        return
    if tp_plan != "auto" and not isinstance(tp_plan, Mapping):
        raise ArgumentError("tp_plan", "None, 'auto', or styles by names of layers", repr(tp_plan))
    if options.get("distributed_config") is not None:
        expected = "one of the two: a DistributedConfig has a tp_plan of its own"
        raise ArgumentError("tp_plan", expected, "tp_plan and distributed_config")


def class_of(config: Any) -> Any:
    """The class that a config names first, where transformers has it; else that of causal language models."""
    found = getattr(transformers, str(next(iter(config.architectures or ()), "")), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model else transformers.AutoModelForCausalLM
