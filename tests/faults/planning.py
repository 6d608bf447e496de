"""Faults of plans, explanations, comparisons of checkpoints, and tiny checkpoints."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "vocabulary-in-equal-shares",
        "qload/models/stored_layers.py",
        'SharedMatrix(f"{prefix}.embed_tokens", "N", short=True)',
        'SharedMatrix(f"{prefix}.embed_tokens", "N")',
    ),
    Fault(
        "inputs-cut-as-outputs",
        "qload/models/stored_layers.py",
        '"K" if name in ROW_PARALLEL',
        '"N" if name in ROW_PARALLEL',
    ),
    Fault(
        "plan-of-columns-whole",
        "qload/plan/sharing.py",
        "length if piece is None else piece[1] - piece[0]",
        "length",
    ),
    Fault(
        "refusals-name-the-first",
        "qload/plan/plan.py",
        "tensor=prefix + error.tensor[len(cached_prefix) :]",
        "tensor=error.tensor",
    ),
    Fault(
        "padding-costs-nothing",
        "qload/plan/plan.py",
        "more = stored * share // size - stored // ranks",
        "more = 0",
    ),
    Fault(
        "explained-for-this-chip",
        "qload/plan/explain.py",
        ".for_chip(self.capability)",
        "",
    ),
    Fault(
        "kernels-of-hopper-everywhere",
        "qload/plan/kernels.py",
        "return launch.why_not_chip(self._capability)",
        "return None",
    ),
    Fault("bits-of-all", "qload/diff/comparison.py", "self.bits = False", "self.bits = True"),
    Fault(
        "rounded-to-the-wider",
        "qload/diff/comparison.py",
        "return min(narrow, key=",
        "return max(narrow, key=",
    ),
    Fault(
        "made-routers-quantized",
        "qload/testing/tiny_checkpoint.py",
        '("lm_head", "gate", "router",',
        '("lm_head", "router",',
    ),
)
