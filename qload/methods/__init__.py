"""Quantization methods and layers for inference engines: a config by name, and a method for each layer.

    config = get_quantization_config("awq_marlin").from_config(quantization_config)
    method = config.get_quant_method(layer, "model.layers.0.mlp.up_proj")
    method.create_weights(layer, K, [N], K, N, torch.float16, weight_loader=load)
    ...                                          # load(param, tensor) for each parameter of the layer
    method.process_weights_after_loading(layer)
    y = method.apply(layer, x, bias)

`GPTQ_MARLIN_TILE`, `GPTQ_MARLIN_MIN_THREAD_K`, `GPTQ_MARLIN_MIN_THREAD_N` (rows of a tile; rows and columns
of a thread block) and `MARLIN_SUPPORTED_GROUP_SIZES` are Marlin's limits; `SCALAR_TYPE_UINT4` and
`SCALAR_TYPE_UINT8` are the types of codes with zero points. A `LinearFactory` creates the module of a weight,
its bias and a function for the maximum over the ranks, an `ExpertsFactory` that of experts.
"""

from qload.methods.awq_marlin import AWQMarlinConfig, AWQMarlinLinearMethod
from qload.methods.base import (
    LinearMethodBase,
    QuantizationConfig,
    QuantizeMethodBase,
    UnquantizedLinearMethod,
    get_quantization_config,
    list_quantization_methods,
    register_quantization,
)
from qload.methods.checkpoint_linear import JoinedLinear, LinearFactory, LoadedLinearMethod
from qload.methods.layers import (
    ColumnParallelLinear,
    ExpertsFactory,
    LinearBase,
    MergedColumnParallelLinear,
    ParallelExperts,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from qload.methods.marlin import (
    GPTQ_MARLIN_MIN_THREAD_K,
    GPTQ_MARLIN_MIN_THREAD_N,
    GPTQ_MARLIN_TILE,
    MARLIN_SUPPORTED_GROUP_SIZES,
    SCALAR_TYPE_UINT4,
    SCALAR_TYPE_UINT8,
    awq_to_marlin_zero_points,
    get_scale_perms,
    marlin_24_make_workspace,
    marlin_make_empty_g_idx,
    marlin_make_workspace,
    marlin_permute_bias,
    marlin_permute_scales,
    marlin_zero_points,
    pack_cols,
    unpack_cols,
    verify_marlin_supported,
    verify_marlin_supports_shape,
)
from qload.methods.parameters import replace_parameter, set_weight_attrs
from qload.methods.typed_linear import CheckpointConfig, TypedLinearMethod
from qload.methods.vocabulary import ParallelLMHead, VocabParallelEmbedding

__all__ = [
    "GPTQ_MARLIN_MIN_THREAD_K",
    "GPTQ_MARLIN_MIN_THREAD_N",
    "GPTQ_MARLIN_TILE",
    "MARLIN_SUPPORTED_GROUP_SIZES",
    "SCALAR_TYPE_UINT4",
    "SCALAR_TYPE_UINT8",
    "AWQMarlinConfig",
    "AWQMarlinLinearMethod",
    "CheckpointConfig",
    "ColumnParallelLinear",
    "ExpertsFactory",
    "JoinedLinear",
    "LinearBase",
    "LinearFactory",
    "LinearMethodBase",
    "LoadedLinearMethod",
    "MergedColumnParallelLinear",
    "ParallelExperts",
    "ParallelLMHead",
    "QKVParallelLinear",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "ReplicatedLinear",
    "RowParallelLinear",
    "TypedLinearMethod",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
    "awq_to_marlin_zero_points",
    "get_quantization_config",
    "get_scale_perms",
    "list_quantization_methods",
    "marlin_24_make_workspace",
    "marlin_make_empty_g_idx",
    "marlin_make_workspace",
    "marlin_permute_bias",
    "marlin_permute_scales",
    "marlin_zero_points",
    "pack_cols",
    "register_quantization",
    "replace_parameter",
    "set_weight_attrs",
    "unpack_cols",
    "verify_marlin_supported",
    "verify_marlin_supports_shape",
]
