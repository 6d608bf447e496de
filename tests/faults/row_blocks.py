"""Faults of quanto, BitNet, AQLM and HQQ: blocks of rows, groups, shifts, and their settings."""

from tests.faults.fault import Fault

_BLOCKS, _SHARDING = "qload/layouts/row_blocks.py", "qload/loader/sharding.py"
_QUANTO, _QUANTO_METHOD = "qload/formats/quanto.py", "qload/detect/methods/quanto.py"
_BITNET, _AQLM, _HQQ = "qload/formats/bitnet.py", "qload/formats/aqlm.py", "qload/formats/hqq.py"

FAULTS = (
    Fault("row-blocks-low-first", _BLOCKS, "shifts[::-1] if self.high_first else shifts", "shifts"),
    Fault("row-blocks-of-the-whole", _SHARDING, "share.layer.sizes)[index]", "share.layer.sizes)"),
    Fault("quanto-shift-added", _QUANTO, "offsets=shifts.float()", "offsets=-shifts.float()"),
    Fault(
        "quanto-product-unrounded",
        _QUANTO,
        "dtype if is_float and dtype != torch.float32 else None",
        "None",
    ),
    Fault("quanto-sizes-unknown", _QUANTO_METHOD, "if stated else claims", "if False else claims"),
    Fault("quanto-scales-left-over", "qload/detect/loaders.py", "[2] in claims.settings)", "[2] in ())"),
    Fault("bitnet-always-multiplies", _BITNET, "divide=self.config.divide,", "divide=False,"),
    Fault("bitnet-code-of-three", _BITNET, "weight & weight >> 1 & FIELDS != 0", "weight & 0 != 0"),
    Fault("aqlm-signed-codes", _AQLM, "self.indices.long() & 2**config.bits - 1", "self.indices.long()"),
    Fault("aqlm-outputs-of-a-vector", _AQLM, "sums.swapaxes(1, 2)", "sums"),
    Fault("hqq-axis-0-in-order", _HQQ, "% (part // size))", "// size)"),
    Fault("hqq-difference-unrounded", _HQQ, "None if dtype == torch.float32 else dtype", "None"),
    Fault("hqq-fused-with-one-scale", _HQQ, '{"text": "P K"}', '{"text": "1 K"}'),
)
