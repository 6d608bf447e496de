"""The rules of `verify`, in the order of their execution: headers, then values, then meaning."""

from qload.errors.rules import RuleText, rule_texts
from qload.verify.rules import architecture, codes, damaged_data, drafts, layers, tensor_values
from qload.verify.rules.rule import Rule, Tier

TEXTS = rule_texts()
LOADING = RuleText(id="layer", stage="headers")  # its findings have the ids of the loader's errors
RULES: tuple[Rule, ...] = (
    Rule(TEXTS["config-side-file"], layers.check_side_files),
    Rule(LOADING, layers.check_layers, each=True),
    Rule(TEXTS["empty-layer"], layers.check_not_empty, each=True),
    Rule(TEXTS["claimed-method"], layers.check_method),
    Rule(TEXTS["bias-shape"], layers.check_biases, each=True),
    Rule(TEXTS["missing-sibling"], layers.check_siblings),
    Rule(TEXTS["layer-count"], architecture.check_layer_count),
    Rule(TEXTS["architecture-missing"], architecture.check_required),
    Rule(TEXTS["architecture-shape"], architecture.check_shapes),
    Rule(TEXTS["quantized-head"], architecture.check_plain_head),
    Rule(TEXTS["draft-shape"], drafts.check_shapes),
    Rule(TEXTS["unexplained-tensor"], layers.check_unexplained),
    Rule(TEXTS["claimed-detail"], layers.check_details),
    Rule(TEXTS["scale-value"], tensor_values.check_scales, each=True),
    Rule(TEXTS["cache-scale"], tensor_values.check_cache_scales),
    Rule(TEXTS["scale-overflow"], tensor_values.check_overflow, each=True),
    Rule(TEXTS["float-value"], tensor_values.check_finite, each=True),
    Rule(TEXTS["tied-head"], architecture.check_tied_head),
    Rule(TEXTS["draft-vocabulary"], drafts.check_vocabulary),
    Rule(TEXTS["field-value"], tensor_values.check_fields, each=True),
    Rule(TEXTS["constant-values"], damaged_data.check_constants),
    Rule(TEXTS["hole"], damaged_data.check_holes, each=True),
    Rule(TEXTS["repeated-block"], damaged_data.check_repeats, each=True),
    Rule(TEXTS["copied-layer"], damaged_data.check_copies),
    Rule(TEXTS["weight-size"], tensor_values.check_weight_sizes),
    Rule(TEXTS["value-outlier"], tensor_values.check_outliers, each=True),
    Rule(TEXTS["float-type"], tensor_values.check_float_types, each=True),
    Rule(TEXTS["block-maximum"], tensor_values.check_block_maxima, each=True),
    Rule(TEXTS["group-count"], codes.check_group_counts, each=True),
    Rule(TEXTS["act-order"], codes.check_act_order, each=True),
    Rule(TEXTS["group-order"], codes.check_group_order),
    Rule(TEXTS["group-size"], codes.check_group_sizes, each=True),
    Rule(TEXTS["symmetry"], codes.check_symmetry, each=True),
    Rule(TEXTS["zero-point-mean"], codes.check_mean),
    Rule(TEXTS["zero-point-reading"], codes.check_readings, each=True),
    Rule(TEXTS["code-order"], codes.check_code_order, each=True),
)

# Rules of `inspect`, for headers alone.
INSPECTED_IDS = {
    "layer", "empty-layer", "claimed-method", "bias-shape", "architecture-shape", "draft-shape",
    "unexplained-tensor",
}  # fmt: skip
INSPECTED: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.id in INSPECTED_IDS)

__all__ = ["INSPECTED", "RULES", "Rule", "Tier"]
