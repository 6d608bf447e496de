"""Faults of plans, explanations, comparisons of checkpoints, and tiny checkpoints."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "vocabulary-in-equal-shares",
        "qload/models/stored_layers.py",
        'SharedMatrix(f"{base}.embed_tokens", "N", short=True)',
        'SharedMatrix(f"{base}.embed_tokens", "N")',
    ),
    Fault(
        "inputs-cut-as-outputs",
        "qload/models/stored_layers.py",
        '"K" if name in INPUTS',
        '"N" if name in INPUTS',
    ),
    Fault(
        "plan-of-columns-whole",
        "qload/plan/sharing.py",
        "whole if piece is None else piece[1] - piece[0]",
        "whole",
    ),
    Fault(
        "refusals-name-the-first",
        "qload/plan/layer_shares.py",
        "tensor=prefix + error.tensor[len(known) :]",
        "tensor=error.tensor",
    ),
    Fault(
        "padding-costs-nothing",
        "qload/plan/layer_shares.py",
        "more = stored * share // size - stored // ranks",
        "more = 0",
    ),
    Fault(
        "explained-for-this-chip",
        "qload/plan/explain.py",
        ".for_chip(question.capability)",
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
