"""Faults of diagnoses, planted faults and vectors: names, certainty and locations."""

from tests.faults.fault import Fault

_ALL = "qload/diagnosis"

FAULTS = (
    Fault(
        "zero-points-named-backwards",
        f"{_ALL}/reading_faults.py",
        "lambda zeros: zeros.int() + 1",
        "lambda zeros: zeros.int() - 1",
    ),
    Fault("any-fault-explains", f"{_ALL}/diagnosis.py", "MIN_SHARE = 0.9", "MIN_SHARE = 0.01"),
    Fault("chance-explains", f"{_ALL}/diagnosis.py", "MIN_EVIDENCE_NATS = 20.0", "MIN_EVIDENCE_NATS = 2e9"),
    Fault(
        "act-order-not-looked-at",
        f"{_ALL}/reading_faults.py",
        "order = codes.k_group.long().argsort(stable=True)",
        "order = codes.k_group.long().argsort(stable=True).flip(0)",
    ),
    Fault(
        "ranks-nearest-to-themselves",
        f"{_ALL}/weight_faults.py",
        "agreeing[best] > agreeing[current] else current",
        "agreeing[best] < agreeing[current] else current",
    ),
    Fault(
        "places-of-the-first-run",
        f"{_ALL}/comparison.py",
        "_range(rows + comparison.first_output)",
        "_range(rows)",
    ),
    Fault("rounding-of-bfloat16-for-all", f"{_ALL}/comparison.py", "relative = min(", "relative = 64 * min("),
    Fault(
        "scattered-zeros-are-a-tile",
        f"{_ALL}/weight_faults.py",
        "if int((tile == 0).sum()) < MIN_KIND_SHARE * tile.numel():",
        "if False:",
    ),
    Fault(
        "planted-twice-is-once",
        "qload/testing/kernel_faults.py",
        "if changed is None or _equal(changed, weight):",
        "if changed is None or not _equal(changed, weight):",
    ),
    Fault(
        "vectors-wrap-is-lost",
        "qload/testing/vectors.py",
        "stored = (zeros - stored_minus) % 2**bits",
        "stored = (zeros - stored_minus).clamp(0)",
    ),
)
