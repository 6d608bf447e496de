"""Readers of methods with several formats, or with long configs; other methods are in the module of a format.

`METHODS` has all of them.
"""

from qload.configs import Method
from qload.detect.methods import (
    auto_round,
    bitsandbytes,
    comfy,
    compressed_tensors,
    fp8,
    gptq,
    hqq,
    modelopt,
    mx,
    quanto,
    quark,
    torchao,
)
from qload.formats import METHODS as FORMAT_METHODS

# quant_method -> its reader, with its declarations.
METHODS: dict[str, Method] = {
    name: method
    for method in (
        *FORMAT_METHODS,
        *gptq.METHODS,
        *bitsandbytes.METHODS,
        *fp8.METHODS,
        *mx.METHODS,
        *compressed_tensors.METHODS,
        *modelopt.METHODS,
        *auto_round.METHODS,
        *comfy.METHODS,
        *torchao.METHODS,
        *quark.METHODS,
        *quanto.METHODS,
        *hqq.METHODS,
    )
    for name in method.names
}
