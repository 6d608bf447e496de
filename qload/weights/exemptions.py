"""Tensors outside of layers: exempt from use by name, with a reason, or unread by any format."""

from __future__ import annotations

import re

from qload import dtypes
from qload.experts.stacked_storage import ExpertStacks
from qload.formats import FORMATS, ROLES
from qload.formats.unquantized import FLOATS
from qload.storage import TensorInfo, WeightStorage

CACHE_SCALE = "a scale of the key/value cache or of attention, which the engine reads"
CACHE_ZERO = "a zero point or bias of the key/value cache, which the engine reads"
BUFFER = "a buffer of positions, masks or counts, which no weight depends on"
ROUTES = "a table of the experts that a token is routed to, which no weight depends on"
STACK = "codes with three or more axes: several experts in one tensor, in an unknown layout"
AXES_OF_LAYER = 2

ATTENTION = re.compile(r"(self_|cross_)?attn|(self_|cross_)?attention|mixer")
PROJECTION = re.compile(r"(q|k|v|kv|qk|qkv)_proj")
# Floats that are no parameters: `masked_bias` of GPT-2, and masks under their usual names.
MASK = re.compile(r"masked_bias|((attn|attention|causal)_)?mask")
ROTATIONS = (
    "freqs_cis",
    "freqs",
)  # rotary positions as complex numbers of length one (Meta's programs)
ROUTE_TABLES = (".tid2eid",)  # of DeepSeek V4
PERMUTATION = "perm"  # reorders the transform of a layer, in compressed-tensors

# Last part of a name, by the part before it. compressed-tensors, vLLM, SGLang and TGI store k_scale and
# v_scale with the attention, ModelOpt with k_proj and v_proj; Quark and older compressed-tensors name them
# output_scale; kv_scale is of older versions of vLLM and TGI; TensorRT-LLM has the rest.
OF_ATTENTION = {
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale", "prob_output_scale",
    "kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor",
    "k_cache_scaling_factor", "v_cache_scaling_factor",
}  # fmt: skip
OF_PROJECTIONS = {"k_scale", "v_scale", "kv_scale", "output_scale"}
ZEROS_OF_ATTENTION = {"k_zero_point", "v_zero_point"}
ZEROS_OF_PROJECTIONS = {"k_bias", "v_bias"}  # ModelOpt's affine caches; not a bias of the outputs

MANY_AXES = tuple(  # suffixes of tensors with three or more axes in some format
    suffix
    for weight in FORMATS
    for spec in weight.tensors(weight.example)
    if len(spec.axes) > AXES_OF_LAYER
    for suffix in spec.suffixes
)


def cache_scale(name: str) -> bool:
    """Return True for a scale of the key/value cache, or of attention itself."""
    return _is_named(name, OF_ATTENTION, OF_PROJECTIONS)


def cache_zero(name: str) -> bool:
    """Return True for a zero point of the key/value cache, or a bias of it."""
    return _is_named(name, ZEROS_OF_ATTENTION, ZEROS_OF_PROJECTIONS)


def exemption(name: str, info: TensorInfo) -> str | None:
    """Reason for which a tensor may stay unused; None without one."""
    if cache_scale(name):
        return CACHE_SCALE
    if cache_zero(name):
        return CACHE_ZERO
    if name.endswith(ROUTE_TABLES) and not info.stored_dtype.is_floating_point:
        return ROUTES
    return BUFFER if _is_buffer(name, info) else None


def unread_reason(name: str, storage: WeightStorage) -> str | None:
    """Reason why no format reads an unused tensor: it belongs to a stack of experts; None for any other.

    Codes with one more axis than a layer has identify a stack.
    """
    if isinstance(storage, ExpertStacks) and name in storage.unread:
        return storage.unread[name]
    info = storage.info(name)
    codes = len(info.shape) > AXES_OF_LAYER and info.stored_dtype not in (*FLOATS, dtypes.bool_, dtypes.int64)
    if codes and not name.endswith(MANY_AXES):
        return STACK
    return None


def _is_named(name: str, of_attention: set[str], of_projections: set[str]) -> bool:
    parent, _, last = name.rpartition(".")
    if last not in of_attention and last not in of_projections:
        return False
    owner = parent.rpartition(".")[2]
    return (last in of_attention and ATTENTION.fullmatch(owner) is not None) or (
        last in of_projections and PROJECTION.fullmatch(owner) is not None
    )


def is_mask(name: str, info: TensorInfo) -> bool:
    """Return True for a mask of attention scores, with minus infinity at hidden positions."""
    last = name.rpartition(".")[2]
    return info.stored_dtype in FLOATS and (
        MASK.fullmatch(last) is not None or (last == "bias" and len(info.shape) == 4)
    )


def _is_buffer(name: str, info: TensorInfo) -> bool:
    """Return True for a mask, for rotations, and for whole numbers that cannot be codes."""
    last = name.rpartition(".")[2]
    if is_mask(name, info) or (info.stored_dtype.is_complex and last in ROTATIONS):
        return True
    if info.stored_dtype.is_floating_point or info.stored_dtype.is_complex or last in (*ROLES, PERMUTATION):
        return False
    if info.stored_dtype in (dtypes.bool_, dtypes.int64) or len(info.shape) < 2:
        return True
    return len(info.shape) == 4 and last in ("bias", "masked_bias", "mask")
