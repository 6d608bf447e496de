"""Faults of the plug-in for transformers, noticed by the tests of its session alone."""

from tests.faults.fault import Fault

ROOT = "qload/engines/transformers"
FILES = ("settings", "whole", "others", "sharing", "mistakes", "processes")
TESTS = tuple(f"tests/engines/transformers/{name}.py" for name in FILES)


def of(name: str, file: str, before: str, after: str) -> Fault:
    """A fault of a file of the plug-in."""
    return Fault(name, f"{ROOT}/{file}.py", before, after, "transformers", TESTS)


FAULTS = (
    of(
        "engine-bias-lost",
        "placeholder_layers",
        "linear(x) if bias is None else linear(x, bias)",
        "linear(x)",
    ),
    of(
        "engine-bias-twice",
        "placeholder_layers",
        "else linear(x, bias)",
        "else linear(x, bias) + bias",
    ),
    of(
        "engine-every-rank-the-first",
        "quantizer",
        'group = model._mesh_manager.get_mesh("tp").get_group()',
        "group = Rank(0, self._plan.ranks)",
    ),
    of("engine-rows-for-columns", "quantizer", 'return Load(prefixes, "K")', "return Load(prefixes)"),
    of(
        "engine-whole-experts-on-every-rank",
        "quantizer",
        'return "tensor" if style == EXPERTS_STYLE else None',
        "return None",
    ),
    of(
        "engine-cuts-unchecked",
        "quantizer",
        "if self.ranks == 1 or isinstance",
        "if self.ranks or isinstance",
    ),
    of(
        "engine-tie-kept-beside-a-head",
        "quantizer",
        'model.all_tied_weights_keys.pop(f"{name}.weight", None)',
        "model.all_tied_weights_keys",
    ),
    of(
        "engine-routing-weights-lost",
        "placeholder_layers",
        "self.filled()(x, topk_ids, topk_weights.to(x.dtype))",
        "self.filled()(x, topk_ids, topk_weights.to(x.dtype) * 0 + 1)",
    ),
    of(
        "engine-experts-of-tokens",
        "placeholder_layers",
        ".repeat_interleave(rows // E)[:, None]",
        ".repeat(rows // E)[:, None]",
    ),
    of(
        "engine-installed-for-good",
        "loading",
        "            AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config\n",
        "            pass\n",
    ),
    of("engine-missing-tensors-drawn", "loading", "    if missing:\n", "    if missing[1:]:\n"),
    of(
        "engine-head-quantized",
        "config",
        "PLAIN_HEAD if policy is None else policy",
        "Modules() if policy is None else policy",
    ),
    of(
        "engine-experts-uncounted",
        "quantizer",
        "count += module.numel",
        "count += 0",
    ),
    of(
        "engine-all-unexpected-silenced",
        "checkpoint",
        "if is_own or name in stacks or name.startswith(leads):",
        "if is_own or prefix or name.startswith(leads):",
    ),
    of(
        "engine-away-forgotten",
        "quantizer",
        'offloaded = look_up(dispatched, name) == "cpu" and str(device) != "cpu"',
        "offloaded = False",
    ),
)
