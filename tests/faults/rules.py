"""Faults of the rules of `verify` and their inputs: thresholds, ties, exemptions, counts, heads."""

from tests.faults.fault import Fault

RULES = "qload/verify/rules"

LOGITS = "qload/verify/logits"

FAULTS = (
    Fault(
        "departures-unseen",
        f"{LOGITS}/compared_layers.py",
        "int((errors > 1).sum())",
        "int((errors > 1e9).sum())",
    ),
    Fault(
        "sizes-never-large",
        f"{RULES}/tensor_values.py",
        "MAX_DEVIATION, MIN_DEVIATION = 2.0,",
        "MAX_DEVIATION, MIN_DEVIATION = 2e9,",
    ),
    Fault("sizes-far-from-all", f"{RULES}/tensor_values.py", "median_low(others),", "max(others),"),
    Fault(
        "sizes-one-by-one",
        f"{RULES}/tensor_values.py",
        "not MIN_DEVIATION <= usual <= MAX_DEVIATION and not",
        "not",
    ),
    Fault(
        "outlier-threshold-crossed", f"{RULES}/tensor_values.py", "MAX_SCALE = 200.0", "MAX_SCALE = 2000.0"
    ),
    Fault("outlier-threshold-lowered", f"{RULES}/tensor_values.py", "MAX_SCALE = 200.0", "MAX_SCALE = 4.0"),
    Fault(
        "lost-scales-unseen",
        f"{RULES}/tensor_values.py",
        "MIN_ZERO_SHARE < statistics.lost < MAX_ZERO_SHARE",
        "MAX_ZERO_SHARE < statistics.lost < MIN_ZERO_SHARE",
    ),
    Fault(
        "hole-threshold-crossed", f"{RULES}/damaged_data.py", "MIN_RUN_BYTES = 512", "MIN_RUN_BYTES = 1 << 20"
    ),
    Fault(
        "stripes-unknown",
        f"{RULES}/damaged_data.py",
        "len(aligned) < MIN_STRIPES or",
        "len(aligned) >= MIN_STRIPES or",
    ),
    Fault(
        "dead-rows-unknown",
        f"{RULES}/damaged_data.py",
        "    return run.byte == 0",
        "    return run.byte != 0",
    ),
    Fault("holes-are-rows", f"{RULES}/damaged_data.py", "if not at_rows or rows < 1", "if rows < 1"),
    Fault(
        "repeats-of-vocabularies",
        f"{RULES}/damaged_data.py",
        "repeats is None or block_of(name) is None or",
        "repeats is None or",
    ),
    Fault(
        "repeats-unseen",
        f"{RULES}/damaged_data.py",
        "if same and not is_zero_weight(",
        "if same and is_zero_weight(",
    ),
    Fault("copied-layer-exempt", f"{RULES}/damaged_data.py", "MIN_MERGED_UNITS = 2", "MIN_MERGED_UNITS = 1"),
    Fault(
        "copied-layer-accused",
        f"{RULES}/damaged_data.py",
        "return merged | _equal_layers(checkpoint, layers).keys()",
        "return merged",
    ),
    Fault(
        "added-layer-accused", f"{RULES}/damaged_data.py", "if len(kinds) == 2 and", "if len(kinds) == 1 and"
    ),
    Fault("copies-never-meant", f"{RULES}/damaged_data.py", "MIN_MERGED_UNITS = 2", "MIN_MERGED_UNITS = 99"),
    Fault("constant-never-told", f"{RULES}/damaged_data.py", "if word is None or", "if word is not None or"),
    Fault(
        "zero-means-unseen",
        f"{RULES}/codes.py",
        "if abs(offset) > MAX_OFFSET + doubt or everywhere or shifted:",
        "if abs(offset) > MAX_OFFSET + doubt and everywhere and shifted:",
    ),
    Fault(
        "zero-means-surely",
        f"{RULES}/codes.py",
        "MAX_STANDARD_ERRORS = 4.0",
        "MAX_STANDARD_ERRORS = 0.0",
    ),
    Fault(
        "sibling-left-out",
        "qload/architecture/names.py",
        '("q_proj", "k_proj", "v_proj")',
        '("q_proj", "v_proj")',
    ),
    Fault(
        "code-order-threshold-crossed",
        f"{RULES}/codes.py",
        "MIN_CORRELATION = 0.45",
        "MIN_CORRELATION = -1.0",
    ),
    Fault(
        "group-order-threshold-crossed",
        f"{RULES}/codes.py",
        "MIN_ORDER_GAIN = 0.02",
        "MIN_ORDER_GAIN = -1.0",
    ),
    Fault(
        "float-types-exchanged",
        f"{RULES}/tensor_values.py",
        "return width > MAX_WIDTH",
        "return width < MAX_WIDTH",
    ),
    Fault(
        "block-maximum-unseen", f"{RULES}/tensor_values.py", "statistics.reach < 1", "statistics.reach < 0"
    ),
    Fault("tie-ignored", f"{RULES}/architecture.py", "or not architecture.tied:", "or architecture.tied:"),
    Fault("cache-scale-sign", f"{RULES}/tensor_values.py", "| (values <= 0) if", "| (values < 0) if"),
    Fault(
        "bytes-counted-twice",
        "qload/checkpoint/coverage.py",
        "return self.read + sum(",
        "return self.read + self.read + sum(",
    ),
    Fault(
        "plain-codes-explained",
        "qload/checkpoint/coverage.py",
        "dtype not in FLOATS:\n        return False",
        "dtype not in FLOATS:\n        return True",
    ),
    Fault(
        "heads-cut-inside",
        "qload/loader/heads.py",
        "if world > 1 and count is not None and (fused or count % world):",
        "if world > 1 and count is not None and fused:",
    ),
    Fault(
        "blocks-anchored-wrongly",
        "qload/architecture/names.py",
        "return BLOCK_LIST.fullmatch(lead) is not None",
        "return BLOCK_LIST.match(lead[1:]) is not None",
    ),
)
