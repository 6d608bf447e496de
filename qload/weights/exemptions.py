"""What a checkpoint holds beside its layers: known by name, with the reason why no layer has it."""

import re
from collections.abc import Mapping

import torch

from qload.formats import FORMATS, ROLES
from qload.formats.unquantized import FLOATS
from qload.storage import TensorInfo

CACHE_SCALE = "a scale of the key/value cache or of attention, which the engine reads"
CACHE_ZERO = "a zero point or bias of the key/value cache, which the engine reads"
BUFFER = "a buffer of positions, masks or counts, which no weight depends on"
FUSED = (
    "stacked experts, of a type of model or in a form that is not known; "
    "the same checkpoint with a tensor for each expert is read"
)

ATTENTION = re.compile(r"(self_|cross_)?attn|(self_|cross_)?attention|mixer")
PROJECTION = re.compile(r"(q|k|v|kv|qk|qkv)_proj")
SCALE_OF_STACK = re.compile(r"(gate|up|down|gate_up)_proj_.*scale.*")
# A float that is no parameter: GPT-2's `masked_bias`, and masks under the names that their makers give them.
MASK = re.compile(r"masked_bias|((attn|attention|causal)_)?mask")
ROTATIONS = (
    "freqs_cis",
    "freqs",
)  # of rotary positions, complex numbers of length one, as Meta's programs have
EXPERTS = re.compile(r"experts|.*_experts|switch_mlp|.*_moe|moe")

# By the last part of a name, and by the part before it. compressed-tensors, and with it vLLM, SGLang and TGI,
# has k_scale and v_scale of the attention, ModelOpt of k_proj and v_proj; Quark and older compressed-tensors
# call these output_scale; kv_scale was vLLM's and TGI's before there were two; TensorRT-LLM has the rest.
OF_ATTENTION = {
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "prob_output_scale",
    "kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor",
    "k_cache_scaling_factor", "v_cache_scaling_factor",
}  # fmt: skip
OF_PROJECTIONS = {"k_scale", "v_scale", "kv_scale", "output_scale"}
ZEROS_OF_ATTENTION = {"k_zero_point", "v_zero_point"}
ZEROS_OF_PROJECTIONS = {"k_bias", "v_bias"}  # ModelOpt's affine caches; not a bias of the outputs

READ = tuple(  # ends of the names of stacks that there is a format for
    suffix
    for weight in FORMATS
    for spec in weight.tensors(weight.example)
    for suffix in spec.suffixes
    if suffix.startswith("_")
)


def cache_scale(name: str) -> bool:
    """Whether a tensor is a scale of the key/value cache, or of attention itself."""
    return _stands(name, OF_ATTENTION, OF_PROJECTIONS)


def cache_zero(name: str) -> bool:
    """Whether a tensor is a zero point of the key/value cache, or a bias of it."""
    return _stands(name, ZEROS_OF_ATTENTION, ZEROS_OF_PROJECTIONS)


def exemption(name: str, info: TensorInfo) -> str | None:
    """Why a tensor that no load used may stay unused; None where nothing says so."""
    if cache_scale(name):
        return CACHE_SCALE
    if cache_zero(name):
        return CACHE_ZERO
    return BUFFER if _is_buffer(name, info) else None


def fused_experts(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a stack of experts, or the scale of one, as `down_proj_weight_scale`."""
    last = name.rpartition(".")[2]
    if last.endswith(READ) or not (len(shape) > 2 or SCALE_OF_STACK.fullmatch(last)):
        return False
    return experts_module(name) is not None


def experts_module(name: str) -> str | None:
    """The module of experts that a tensor of all of them stands in; None where it is not such a tensor.

    `model.layers.0.mlp.experts.gate_up_proj_scale` -> `model.layers.0.mlp.experts`.
    """
    parts = name.split(".")[:-1]
    for count in range(len(parts), 0, -1):
        if parts[count - 1].isdecimal():
            return None
        if EXPERTS.fullmatch(parts[count - 1]):
            return ".".join(parts[:count])
    return None


def unread_stacks(infos: Mapping[str, TensorInfo]) -> set[str]:
    """Those of some tensors that are stacks of quantized experts, or scales of them.

    Stacks of plain floats without any scale beside them are parameters as any other.
    """
    modules: dict[str, list[str]] = {}
    for name, info in infos.items():
        if fused_experts(name, info.shape):
            modules.setdefault(experts_module(name) or "", []).append(name)
    return {name for names in modules.values() if _is_quantized(names, infos) for name in names}


def _is_quantized(names: list[str], infos: Mapping[str, TensorInfo]) -> bool:
    return any(infos[name].dtype not in FLOATS or "scale" in name.rpartition(".")[2] for name in names)


def _stands(name: str, of_attention: set[str], of_projections: set[str]) -> bool:
    parent, _, last = name.rpartition(".")
    if last not in of_attention and last not in of_projections:
        return False
    owner = parent.rpartition(".")[2]
    return (last in of_attention and ATTENTION.fullmatch(owner) is not None) or (
        last in of_projections and PROJECTION.fullmatch(owner) is not None
    )


def is_mask(name: str, info: TensorInfo) -> bool:
    """Whether floats are added to the scores of attention, where minus infinity hides a place."""
    last = name.rpartition(".")[2]
    return info.dtype in FLOATS and (
        MASK.fullmatch(last) is not None or (last == "bias" and len(info.shape) == 4)
    )


def _is_buffer(name: str, info: TensorInfo) -> bool:
    """Whole numbers of a dtype that no format packs codes into, or too few for codes; masks; rotations."""
    last = name.rpartition(".")[2]
    if is_mask(name, info) or (info.dtype.is_complex and last in ROTATIONS):
        return True
    if info.dtype.is_floating_point or info.dtype.is_complex or last in ROLES:
        return False
    if info.dtype in (torch.bool, torch.int64) or len(info.shape) < 2:
        return True
    return len(info.shape) == 4 and last in ("bias", "masked_bias", "mask")
