"""Faults of experts in stacked tensors: parts, order, experts and scales."""

from tests.faults.fault import Fault

FINDER = "qload/experts/stack_finder.py"
LAYOUTS = "qload/experts/stack_layouts.py"
SLICES = "qload/experts/stack_layouts.py"
STACKS = "qload/experts/stacked_storage.py"

JOINED = "qload/conversion/stacked_experts.py"

FAULTS = (
    Fault("new-stacks-of-other-models", JOINED, "source.architecture.type != GPT_OSS:", "False:"),
    Fault(
        "new-stack-in-halves",
        JOINED,
        "[slot.first : end : slot.step]",
        "[slot.first * rows : (slot.first + 1) * rows]",
    ),
    Fault(
        "biases-of-split-stacks-lost",
        JOINED,
        "for stack in biases for name, _, _ in stack.names()]",
        "for stack in biases[:0] for name, _, _ in stack.names()]",
    ),
    Fault(
        "deepseek-exponents-as-bytes",
        "qload/conversion/float4.py",
        "DEEPSEEK_TENSORS, dtypes.int8, dtypes.float8_e8m0fnu",
        "DEEPSEEK_TENSORS, dtypes.int8",
    ),
    Fault("expert-dtype-kept", "qload/conversion/new_checkpoint.py", "(*SECTIONS, EXPERT_DTYPE)", "SECTIONS"),
    Fault("stacks-dotted-scales-are-words", FINDER, 'elif ending == ".scales" and', "elif False and"),
    Fault(
        "mxfp4-dotted-blocks-unknown",
        "qload/formats/mx.py",
        'stored=("_blocks", "blocks")',
        'stored="_blocks"',
    ),
    Fault(
        "stacked-gate-and-up-exchanged",
        LAYOUTS,
        "True, at * apart, step,",
        "True, (count - 1 - at) * apart, step,",
    ),
    Fault(
        "turns-of-gate-and-up-ignored",
        LAYOUTS,
        "(count, 1) if self.interleaved",
        "(1, outputs) if self.interleaved",
    ),
    Fault(
        "stacked-expert-cut-off-by-one",
        SLICES,
        "return (slice(expert, expert + count), *slices) if",
        "return (slice(max(0, expert - 1), max(0, expert - 1) + count), *slices) if",
    ),
    Fault(
        "scale-of-the-next-stacked-expert",
        FINDER,
        'yield f"{self.lead}.{expert}.{part}", slot, expert\n',
        'yield f"{self.lead}.{expert}.{part}", slot, (expert + ("scale" in part)) % self.count\n',
    ),
    Fault(
        "inputs-first-of-every-type",
        FINDER,
        "            shared = {self.architecture.table.stacked.inputs_first}\n",
        "            shared = {True}\n",
    ),
    Fault("axes-told-by-no-scale", FINDER, "if by_scales is not None and by_scales.sure:", "if False:"),
    Fault("axes-told-by-no-size", FINDER, "elif sizes is not None:", "elif False:"),
    Fault(
        "halves-of-every-type",
        FINDER,
        'return "halves" if self._joined_blocks(',
        'return "halves" if True or self._joined_blocks(',
    ),
    Fault(
        "blocks-of-both-parts-cut",
        LAYOUTS,
        "if self.interleaved or (straddle and not joined_apart):",
        "if self.interleaved:",
    ),
    Fault("two-readings-of-blocks-unseen", LAYOUTS, "two_readings or dims[0]", "dims[0]"),
    Fault(
        "zero-points-of-two-layers-in-a-word",
        LAYOUTS,
        "if count == 1 or aligned else None",
        "if True else None",
    ),
    Fault("shape-of-all-experts-unchecked", SLICES, "values[:-2] not in ([], [self.experts]) or", ""),
    Fault(
        "scale-of-a-plain-expert-cut", LAYOUTS, 'field == "weight_scale_inv" and not self.quantized', "False"
    ),
    Fault("block-of-another-stack", STACKS, "last[:2] != (slot.source, wide)", "last[1] != wide"),
    Fault("columns-beside-those-asked-for", STACKS, "first = wide[-1].start", "first = stored[-1].start"),
    Fault("two-sources-unseen", STACKS, "if name in stored or name in self._slots:", "if False:"),
    Fault(
        "stack-counted-beside-its-experts",
        STACKS,
        "            if stack is None:\n                yield name\n",
        "            yield name\n            if stack is None:\n                continue\n",
    ),
    Fault("stack-that-is-loaded-unused", STACKS, "iter((name,)) if stack is None", "iter((name,)) if stack"),
    Fault(
        "more-experts-than-the-config",
        FINDER,
        "MAX_EXPERTS if stated is None else min(stated, MAX_EXPERTS)",
        "MAX_EXPERTS",
    ),
    Fault(
        "joined-scales-of-one-naming",
        FINDER,
        'FAMILIES = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}',
        "FAMILIES: dict[str, tuple[str, ...]] = {}",
    ),
)
