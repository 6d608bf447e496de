"""Faults of torchao: headers, swizzled scales, signed codes, floats as zero points."""

from tests.faults.fault import Fault

_HEADER, _METHOD = "qload/detect/torchao_header.py", "qload/detect/methods/torchao.py"
_FORMAT, _SWIZZLE = "qload/formats/torchao.py", "qload/layouts/swizzle.py"

FAULTS = (
    Fault("torchao-tiles-untransposed", _SWIZZLE, "tiles.swapaxes(1, 3).reshape(", "tiles.reshape("),
    Fault("torchao-swizzle-ignored", _METHOD, "MXFP8Config(swizzled)", "MXFP8Config(False)"),
    Fault(
        "torchao-int4-unsigned",
        _FORMAT,
        "self.weight.view(torch.uint8) ^ 0x88",
        "self.weight.view(torch.uint8)",
    ),
    Fault(
        "torchao-int4-zero-subtracted",
        _FORMAT,
        "offsets=-self.weight_zero_point.T",
        "offsets=self.weight_zero_point.T",
    ),
    Fault(
        "torchao-intx-zero-lost",
        _FORMAT,
        "zeros=self.weight_zero_point.int() + half",
        "zeros=0 * self.weight_zero_point.int() + half",
    ),
    Fault(
        "torchao-zero-points-dropped",
        "qload/formats/compressed_tensors/integers.py",
        '"as stored" if points.any() else "0"',
        '"0"',
    ),
    Fault(
        "torchao-second-scale-unknown",
        _METHOD,
        '("weight_scale_2", SECOND_SCALE), ',
        "",
    ),
    Fault(
        "torchao-rows-as-blocks", _METHOD, "if columns and (rows or block[0] == 1):", "if columns and rows:"
    ),
    Fault(
        "torchao-first-file-alone",
        _HEADER,
        "in metadata_of(storage).items():\n        if TENSOR_NAMES not",
        "in [*metadata_of(storage).items()][:1]:\n        if TENSOR_NAMES not",
    ),
)
