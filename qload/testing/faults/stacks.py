"""Faults of experts that are stored in stacks: which part, which turn, which expert, which scale."""

from qload.testing.faults.fault import Fault

FORMS = "qload/experts/stacks_forms.py"
FOUND = "qload/experts/stacks_found.py"
SLOTS = "qload/experts/stacks_slots.py"
STACKS = "qload/experts/stacks.py"

FAULTS = (
    Fault(
        "stacked-gate-and-up-exchanged",
        FORMS,
        "True, at * apart, step,",
        "True, (count - 1 - at) * apart, step,",
    ),
    Fault(
        "turns-of-gate-and-up-ignored",
        FORMS,
        "(count, 1) if self.interleaved",
        "(1, each) if self.interleaved",
    ),
    Fault(
        "stacked-expert-cut-off-by-one",
        SLOTS,
        "return (slice(expert, expert + 1), *found) if",
        "return (slice(max(0, expert - 1), max(1, expert)), *found) if",
    ),
    Fault(
        "scale-of-the-next-stacked-expert",
        FOUND,
        'yield f"{self.lead}.{expert}.{part}", slot, expert\n',
        'yield f"{self.lead}.{expert}.{part}", slot, (expert + ("scale" in part)) % self.count\n',
    ),
    Fault(
        "inputs-first-of-every-type",
        FOUND,
        "        own = self.architecture.table.stacked\n",
        "        own = Stacked(True, self.architecture.table.stacked.interleaved)\n",
    ),
    Fault(
        "blocks-of-both-parts-cut",
        FORMS,
        "return None if self.interleaved or straddle else",
        "return None if self.interleaved else",
    ),
    Fault("scale-of-a-plain-expert-cut", FORMS, '(field == "weight_scale_inv" and not self.fp8)', "False"),
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
        FOUND,
        "MOST_EXPERTS if said is None else min(said, MOST_EXPERTS)",
        "MOST_EXPERTS",
    ),
    Fault(
        "joined-scales-of-one-naming",
        FOUND,
        'FAMILIES = (MATRICES, {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)})',
        "FAMILIES = (MATRICES,)",
    ),
)
