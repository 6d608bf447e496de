"""The rules of `verify`, in the order of their execution: headers, then values, then meaning."""

from qload.verify.rules.architecture import (
    ARCHITECTURE_MISSING,
    ARCHITECTURE_SHAPE,
    LAYER_COUNT,
    QUANTIZED_HEAD,
    TIED_HEAD,
)
from qload.verify.rules.config import CLAIMED_DETAIL, CLAIMED_METHOD, CONFIG_SIDE_FILE
from qload.verify.rules.copies import COPIED_LAYER, REPEATED_BLOCK
from qload.verify.rules.groups import ACT_ORDER, GROUP_COUNT, GROUP_ORDER, GROUP_SIZE
from qload.verify.rules.layers import (
    BIAS_SHAPE,
    EMPTY_LAYER,
    LAYERS,
    MISSING_SIBLING,
    UNEXPLAINED_TENSOR,
)
from qload.verify.rules.rule import Rule, Tier
from qload.verify.rules.scales import BLOCK_MAXIMUM, CACHE_SCALE, SCALE_OVERFLOW, SCALE_VALUE
from qload.verify.rules.tensor_values import (
    FIELD_VALUE,
    FLOAT_TYPE,
    FLOAT_VALUE,
    VALUE_OUTLIER,
    WEIGHT_SIZE,
)
from qload.verify.rules.unwritten import CONSTANT_VALUES, HOLE
from qload.verify.rules.zero_points import CODE_ORDER, SYMMETRY, ZERO_POINT_MEAN, ZERO_POINT_READING

RULES: tuple[Rule, ...] = (
    CONFIG_SIDE_FILE,
    LAYERS,
    EMPTY_LAYER,
    CLAIMED_METHOD,
    BIAS_SHAPE,
    MISSING_SIBLING,
    LAYER_COUNT,
    ARCHITECTURE_MISSING,
    ARCHITECTURE_SHAPE,
    QUANTIZED_HEAD,
    UNEXPLAINED_TENSOR,
    CLAIMED_DETAIL,
    SCALE_VALUE,
    CACHE_SCALE,
    SCALE_OVERFLOW,
    FLOAT_VALUE,
    TIED_HEAD,
    FIELD_VALUE,
    CONSTANT_VALUES,
    HOLE,
    REPEATED_BLOCK,
    COPIED_LAYER,
    WEIGHT_SIZE,
    VALUE_OUTLIER,
    FLOAT_TYPE,
    BLOCK_MAXIMUM,
    GROUP_COUNT,
    ACT_ORDER,
    GROUP_ORDER,
    GROUP_SIZE,
    SYMMETRY,
    ZERO_POINT_MEAN,
    ZERO_POINT_READING,
    CODE_ORDER,
)

# Rules of `inspect`, for headers alone.
INSPECTED: tuple[Rule, ...] = (
    LAYERS,
    EMPTY_LAYER,
    CLAIMED_METHOD,
    BIAS_SHAPE,
    ARCHITECTURE_SHAPE,
    UNEXPLAINED_TENSOR,
)

__all__ = ["INSPECTED", "RULES", "Rule", "Tier"]
