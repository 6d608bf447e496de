"""Faults of tensor-parallel layers and of worlds: biases, sums, rows, heads and messages between ranks."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "row-bias-on-every-rank",
        "qload/methods/checkpoint_linear.py",
        '    if split == "K" and weights.process_group.rank():\n',
        "    if False:\n",
    ),
    Fault(
        "bias-of-other-heads",
        "qload/methods/checkpoint_linear.py",
        "number, last = group.rank() // part.copies, group.size() // part.copies - 1",
        "number, last = group.rank() % (group.size() // part.copies), group.size() // part.copies - 1",
    ),
    Fault(
        "rows-not-summed",
        "qload/methods/layers.py",
        "== 0 else None)\n        return y if self.collectives is None else self.collectives.summed(y)\n",
        "== 0 else None)\n        return y\n",
    ),
    Fault(
        "unlike-parts-fused",
        "qload/methods/checkpoint_linear.py",
        "    except MismatchError:\n        return False\n",
        "    except MismatchError:\n        return True\n",
    ),
    Fault(
        "largest-of-own-inputs",
        "qload/methods/checkpoint_linear.py",
        "    return maximum_over(group) if",
        '    return "own" if',
    ),
    Fault(
        "tokens-of-other-ranks-kept",
        "qload/methods/vocabulary.py",
        "self.collectives.summed(vectors.masked_fill(on_other_rank[..., None], 0))",
        "self.collectives.summed(vectors)",
    ),
    Fault(
        "last-rank-has-no-shorter-share",
        "qload/methods/vocabulary.py",
        "else (loaded.whole[0] - count) // last\n",
        "else count\n",
    ),
    Fault(
        "interleaved-heads-left",
        "qload/methods/layers.py",
        "        if not self.interleaved:\n",
        "        if True:\n",
    ),
    Fault(
        "last-error-agreed-on",
        "qload/parallel/launcher.py",
        "    first = next(rank for rank, size in enumerate(sizes) if size)\n",
        "    first = max(rank for rank, size in enumerate(sizes) if size)\n",
    ),
    Fault(
        "group-kept-for-ever",
        "qload/parallel/process_group.py",
        "group.size(), weakref.ref(known))",
        "group.size(), lambda: known)",
    ),
    Fault(
        "death-taken-for-leaving",
        "qload/parallel/launcher.py",
        "            return LostRankError(rank, self.world, PROCESS_ENDED)\n",
        "            return None\n",
    ),
    Fault(
        "rank-0-tells-nobody",
        "qload/parallel/launcher.py",
        "                    if self.rank == 0:\n",
        "                    if False:\n",
    ),
)
