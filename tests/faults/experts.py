"""Faults of experts: their names, stacks, shares, biases and facts."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "gate-up-exchanged",
        "qload/experts/load.py",
        "stack.narrow(join + 1, part_number * extent, extent)",
        "stack.narrow(join + 1, (len(names) - 1 - part_number) * extent, extent)",
    ),
    Fault(
        "expert-cut-off-by-one",
        "qload/experts/load.py",
        "names[matrix][spec.name][experts.start : experts.stop]\n            for",
        "names[matrix][spec.name][max(experts.start - 1, 0) :][: len(experts)]\n            for",
    ),
    Fault(
        "scale-of-the-next-expert",
        "qload/experts/weight.py",
        "held = {field: tensor[index] for",
        'held = {field: tensor[(index + ("scale" in field)) % len(self)] for',
    ),
    Fault(
        "uneven-experts-lost",
        "qload/experts/expert_parallel.py",
        "start + each + (rank < more)",
        "start + each",
    ),
    Fault(
        "expert-map-not-local",
        "qload/experts/expert_parallel.py",
        "= torch.arange(len(self))",
        "= torch.arange(self.start, self.stop)",
    ),
    Fault(
        "grid-of-ranks-turned",
        "qload/experts/expert_parallel.py",
        "Grid(Rank(rank % cutting, cutting), Rank(rank // cutting, expert_ranks))",
        "Grid(Rank(rank // expert_ranks, cutting), Rank(rank % expert_ranks, expert_ranks))",
    ),
    Fault(
        "down-bias-on-every-rank",
        "qload/experts/load.py",
        "    if source.process_group.rank():\n",
        "    if False:\n",
    ),
    Fault(
        "up-bias-over-gate-bias",
        "qload/experts/load.py",
        "        at += width\n",
        "        at += 0\n",
    ),
    Fault(
        "experts-not-compared",
        "qload/experts/expert_description.py",
        "        if a != b:\n",
        "        if False:\n",
    ),
    Fault(
        "headers-of-experts-not-compared",
        "qload/experts/expert_description.py",
        "alike = alike and other.stored_dtype == dtype and other.shape == shape",
        "alike = alike and other.stored_dtype == dtype",
    ),
    Fault(
        "facts-of-experts-not-compared",
        "qload/experts/expert_description.py",
        "if not same)",
        "if False)",
    ),
    Fault(
        "config-entries-of-experts-not-compared",
        "qload/loader/formats.py",
        "return self._entries(first) == self._entries(other)",
        "return True",
    ),
    Fault(
        "zero-points-of-the-first-expert",
        "qload/experts/load.py",
        "            if not config.decides_alike(claims, rows):\n",
        "            if False:\n",
    ),
    Fault(
        "rows-of-one-tensor",
        "qload/storage/safetensors.py",
        "entry.begin + offset - first.begin",
        "offset",
    ),
    Fault(
        "promised-experts-uncounted",
        "qload/experts/names.py",
        "    count = promised[0]\n",
        "    count = last + 1\n",
    ),
    Fault(
        "act-order-share-taken-for-whole",
        "qload/experts/weight.py",
        "        if whole == self.layer.K:\n",
        "        if whole >= self.layer.K:\n",
    ),
    Fault(
        "routing-weight-on-the-output",
        "qload/experts/activation.py",
        "return ExpertFacts(known, gating.weighted)",
        "return ExpertFacts(known)",
    ),
    Fault(
        "part-read-over-part",
        "qload/loader/sharding.py",
        "        at += extent or 0\n",
        "        at += 0\n",
    ),
    Fault(
        "router-quantized",
        "qload/quantize/policy.py",
        'return f".{prefix}".endswith(',
        'return f".{prefix}".startswith(',
    ),
)
