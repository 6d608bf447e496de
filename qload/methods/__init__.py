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

import lazy_loader

import qload.methods.typed_linear  # noqa: F401  (registers a config for each format)

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
