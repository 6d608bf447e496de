"""Faults of experts: routing, routing weights, and their products."""

from tests.faults.fault import Fault

_ROUTING = "qload/experts/routing.py"
_CONFIG = "qload/experts/routing.py"
_GATED = "qload/experts/activation.py"
_MODULE, _PRODUCTS = "qload/kernels/experts_function.py", "qload/kernels/experts_function.py"
_ROUTED = "qload/kernels/experts_function.py"
_DIVIDED = """\
    if routing.renormalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + NO_ZERO)
"""
_ONLY_SUMMED = "    if routing.renormalized:\n        weights = weights / weights.sum(dim=-1, keepdim=True)\n"

FAULTS = (
    Fault(
        "bias-in-the-weights",
        _ROUTING,
        "weights = scores.gather(-1, ids)",
        "weights = choice.gather(-1, ids)",
    ),
    Fault("bias-in-no-choice", _ROUTING, "choice = scores + correction_bias", "choice = scores"),
    Fault(
        "scaled-twice",
        _ROUTING,
        "weights, ids = allowed.topk(routing.top_k, dim=-1, sorted=False)",
        "weights, ids = (routing.factor * allowed).topk(routing.top_k, dim=-1, sorted=False)",
    ),
    Fault(
        "scaled-before-the-sum",
        _ROUTING,
        f"{_DIVIDED}    return ids, weights * routing.factor",
        f"    weights = weights * routing.factor\n{_DIVIDED}    return ids, weights",
    ),
    Fault(
        "group-score-of-v2",
        _ROUTING,
        "_in_best_groups(choice, routing, 2)",
        "_in_best_groups(choice, routing, 1)",
    ),
    Fault(
        "group-score-of-v3",
        _ROUTING,
        "_in_best_groups(scores, routing, 1)",
        "_in_best_groups(scores, routing, 2)",
    ),
    Fault("groups-masked-by-0", _ROUTING, 'float("-inf")', "0.0"),
    Fault(
        "groups-not-masked",
        _ROUTING,
        "allowed = scores.masked_fill(",
        "allowed = scores; scores.masked_fill(",
    ),
    Fault("never-renormalized", _ROUTING, _ONLY_SUMMED, ""),
    Fault(
        "always-renormalized", _ROUTING, _ONLY_SUMMED, _ONLY_SUMMED.replace("routing.renormalized", "True")
    ),
    Fault(
        "softmax-before-the-choice",
        _ROUTING,
        "return ids, torch.softmax(values, dim=-1, dtype=logits.dtype)",
        "return ids, torch.softmax(logits, dim=-1, dtype=logits.dtype).gather(-1, ids)",
    ),
    Fault(
        "scores-in-a-narrow-dtype",
        _ROUTING,
        "scores = torch.softmax(logits, dim=-1, dtype=torch.float32)",
        "scores = torch.softmax(logits, dim=-1, dtype=logits.dtype).float()",
    ),
    Fault(
        "router-in-a-narrow-dtype",
        _ROUTING,
        "        if self.method in GROUPED:\n            x,",
        "        if not x.numel():\n            x,",
    ),
    Fault("groups-that-do-not-divide", _ROUTING, " and self.experts % self.groups == 0", ""),
    Fault("more-experts-than-groups-have", _ROUTING, "self.top_k > most", "self.top_k > self.experts"),
    Fault(
        "groups-of-a-greedy-router", _CONFIG, 'if self.topk_method == "greedy":', 'if self.topk_method == "":'
    ),
    Fault("gate-not-clamped", _GATED, "gate.clamp(max=self.limit)", "gate"),
    Fault("up-clamped-on-one-side", _GATED, "up.clamp(-self.limit, self.limit)", "up.clamp(max=self.limit)"),
    Fault("up-without-one", _GATED, "return (up + 1) *", "return up *"),
    Fault("gate-and-up-exchanged", _MODULE, "*gate_up.chunk(2, dim=-1)", "*gate_up.chunk(2, dim=-1)[::-1]"),
    Fault(
        "weight-on-the-other-side",
        _MODULE,
        'taken * own if facts.side == "input" else taken)',
        'taken if facts.side == "input" else taken * own)',
    ),
    Fault("experts-off-by-one", _ROUTED, "place[experts[starts]]", "place[experts[starts] - 1]"),
    Fault("experts-elsewhere-are-the-last", _ROUTED, "order[place[flat[order]] >= 0]", "order"),
    Fault("bias-of-the-first-expert", _PRODUCTS, "else biases[expert]", "else biases[0]"),
    Fault(
        "sums-in-falling-order",
        _ROUTED,
        "range(int(turn.max(initial=-1)) + 1)]",
        "range(int(turn.max(initial=-1)), -1, -1)]",
    ),
    Fault("sums-of-one-expert-a-token", _ROUTED, "int(turn.max(initial=-1)) + 1", "min(1, len(turn))"),
    Fault(
        "experts-of-a-run-too-few",
        _ROUTED,
        "slice(first, None), slice(start, stop)",
        "slice(first, None), slice(stop, stop)",
    ),
    Fault(
        "experts-kept-for-ever",
        _PRODUCTS,
        "if seen != before:",
        "if not before:",
    ),
    Fault(
        "experts-keep-one-matrix",
        _PRODUCTS,
        "found[expert] = KeptMatrix",
        "found[expert] = found[0] = KeptMatrix",
    ),
    Fault(
        "experts-left-to-torch",
        _PRODUCTS,
        "made = None if kept is None or not as_it_comes else kept.multiply(some, bias)",
        "made = None",
    ),
    Fault("experts-between-not-rounded", _PRODUCTS, "as_it_comes and self.rounded is not None", "False"),
    Fault(
        "sums-in-the-dtype-of-inputs",
        _MODULE,
        "wide = torch.promote_types(x.dtype, torch.float32)",
        "wide = x.dtype",
    ),
    Fault(
        "experts-inputs-as-they-come",
        _PRODUCTS,
        "bias, self.activations, self.maximum, self.narrow, of_rows",
        'bias, "unquantized", self.maximum, self.narrow, of_rows',
    ),
    Fault(
        "experts-inputs-by-a-share",
        _PRODUCTS,
        "bias, self.activations, self.maximum, self.narrow, of_rows",
        'bias, self.activations, "own", self.narrow, of_rows',
    ),
    Fault("experts-scale-of-all-tokens", _MODULE, "and scheme.covers_all_tokens", "and not scheme"),
    Fault(
        "experts-inputs-not-compared",
        "qload/experts/expert_description.py",
        "first.format.activations, other.format.activations",
        "None, None",
    ),
    Fault("experts-below-0", _ROUTED, "(ids < 0) | (ids >= total)", "ids >= total"),
)
