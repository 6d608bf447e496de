"""Faults of the rules of `verify` and their inputs: thresholds, ties, exemptions, counts, heads."""

from tests.faults.fault import Fault

RULES = "qload/verify/rules"

LOGITS = "qload/verify/logits"

FAULTS = (
    Fault(
        "departures-unseen", f"{LOGITS}/watched.py", "int((judged > 1).sum())", "int((judged > 1e9).sum())"
    ),
    Fault("sizes-never-large", f"{RULES}/sizes.py", "LARGEST, SMALLEST = 2.0,", "LARGEST, SMALLEST = 2e9,"),
    Fault("sizes-far-from-all", f"{RULES}/sizes.py", "median_low(alike),", "max(alike),"),
    Fault("sizes-one-by-one", f"{RULES}/sizes.py", "not SMALLEST <= whole <= LARGEST and not", "not"),
    Fault("outlier-threshold-crossed", f"{RULES}/outliers.py", "SCALE = 200.0", "SCALE = 2000.0"),
    Fault("outlier-threshold-lowered", f"{RULES}/outliers.py", "SCALE = 200.0", "SCALE = 4.0"),
    Fault("lost-scales-unseen", f"{RULES}/outliers.py", "LOST < found.lost < ALL", "ALL < found.lost < LOST"),
    Fault("hole-threshold-crossed", f"{RULES}/holes.py", "LEAST = 512", "LEAST = 1 << 20"),
    Fault("stripes-unknown", f"{RULES}/padding.py", "len(alike) < SEVERAL or", "len(alike) >= SEVERAL or"),
    Fault("dead-rows-unknown", f"{RULES}/holes.py", "    return run.byte == 0", "    return run.byte != 0"),
    Fault("holes-are-rows", f"{RULES}/holes.py", "if not whole or rows < 1", "if rows < 1"),
    Fault(
        "repeats-of-vocabularies",
        f"{RULES}/repeats.py",
        "repeats is None or block(name) is None or",
        "repeats is None or",
    ),
    Fault("repeats-unseen", f"{RULES}/repeats.py", "if same and not means_zero(", "if same and means_zero("),
    Fault("copied-layer-exempt", f"{RULES}/copies.py", "MERGED = 2", "MERGED = 1"),
    Fault(
        "copied-layer-accused",
        f"{RULES}/copies.py",
        "return merged | _twins(subject, layers).keys()",
        "return merged",
    ),
    Fault("added-layer-accused", f"{RULES}/expanded.py", "if len(kinds) == 2 and", "if len(kinds) == 1 and"),
    Fault("copies-never-meant", f"{RULES}/copies.py", "MERGED = 2", "MERGED = 99"),
    Fault("constant-never-told", f"{RULES}/constants.py", "if word is None or", "if word is not None or"),
    Fault(
        "zero-means-unseen",
        f"{RULES}/zero_means.py",
        "if abs(offset) > APART + doubt or everywhere or beside:",
        "if abs(offset) > APART + doubt and everywhere and beside:",
    ),
    Fault("zero-means-surely", f"{RULES}/zero_means.py", "SURE = 4.0", "SURE = 0.0"),
    Fault(
        "sibling-left-out", "qload/verify/kin.py", '("q_proj", "k_proj", "v_proj")', '("q_proj", "v_proj")'
    ),
    Fault("code-order-threshold-crossed", f"{RULES}/code_order.py", "LEAST = 0.45", "LEAST = -1.0"),
    Fault("group-order-threshold-crossed", f"{RULES}/grouping.py", "GAIN = 0.02", "GAIN = -1.0"),
    Fault("float-types-exchanged", f"{RULES}/float_types.py", "return width > WIDE", "return width < WIDE"),
    Fault("block-maximum-unseen", f"{RULES}/block_maximum.py", "found.reach < 1", "found.reach < 0"),
    Fault("tie-ignored", f"{RULES}/architecture_head.py", "not architecture.tied or", "architecture.tied or"),
    Fault("cache-scale-sign", f"{RULES}/cache_scales.py", "| (values <= 0) if", "| (values < 0) if"),
    Fault(
        "bytes-counted-twice",
        "qload/listing/coverage.py",
        "return self.read + sum(",
        "return self.read + self.read + sum(",
    ),
    Fault(
        "plain-codes-explained",
        "qload/listing/coverage.py",
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
        "qload/verify/kin.py",
        "return BLOCK.fullmatch(lead) is not None",
        "return BLOCK.match(lead[1:]) is not None",
    ),
)
