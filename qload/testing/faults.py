"""Breaks qload on purpose, one seeded fault at a time, and prints which tests notice: the kill matrix.

    python -m qload.testing.faults                 every fault
    python -m qload.testing.faults zero-plus-one   one of them

A fault is a patch of one place: it is applied to a copy of the project, the tests run there, and a fault
that fewer than two tests notice fails the run. No test knows the faults.
"""

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from qload.errors import ArgumentError

log = logging.getLogger("qload")

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("qload", "tests", "fixtures", "golden", "docs", "pyproject.toml", "noxfile.py")
LEAST_KILLS = 2
# Not tests/meta, which knows every fault by its name.
TESTS = [
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-n",
    "2",
    "--tb=no",
    "-rfE",
    "--ignore=tests/meta",
    "-m",
    "not gpu",
]
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Fault:
    """`before`, which stands once in `file`, becomes `after`."""

    name: str
    file: str
    before: str
    after: str

    def apply(self, root: Path) -> None:
        """Break the copy of the project under `root`."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            found = f"{text.count(self.before)} times in {self.file}"
            raise ArgumentError(f"fault {self.name}", f"{self.before!r} once", found)
        path.write_text(text.replace(self.before, self.after))


FAULTS = (
    Fault(
        "zero-plus-one",
        "qload/layouts/zeros.py",
        "        return packing.unpack(words)\n",
        "        return packing.unpack(words).add(1)\n",
    ),
    Fault(
        "zero-mask-lost",
        "qload/layouts/zeros.py",
        "packing.unpack(words.add(_ONES[packing.bits]))",
        "packing.unpack(words).add(1)",
    ),
    Fault("nibble-order-awq", "qload/layouts/awq.py", "k (c j r) -> k c (r j)", "k (c j r) -> k c (j r)"),
    Fault(
        "nibble-order-gptq",
        "qload/layouts/gptq.py",
        '"(kp i) n -> kp n (i)", i=32 // bits',
        '"(kp j r) n -> kp n (r j)", r=2, j=16 // bits',
    ),
    Fault("exllama-order", "qload/layouts/exllama.py", "kp n (r j)", "kp n (j r)"),
    Fault(
        "straddle-lost",
        "qload/layouts/packing.py",
        "while low < bits:\n",
        "while low < bits and (low == 0 or bits != 3):\n",
    ),
    Fault(
        "sign-extended",
        "qload/layouts/packing.py",
        "part = (runs[..., f.word] >> f.bit) & _mask(f.width)",
        "part = runs[..., f.word] >> f.bit",
    ),
    Fault(
        "scales-rolled",
        "qload/spec/weight.py",
        "per_group[:, self.k_group]",
        "per_group.roll(1, 1)[:, self.k_group]",
    ),
    Fault(
        "index-shifted-always",
        "qload/loader/formats.py",
        "return fact - _first(spec.index_of, share)",
        "return fact - fact[0]",
    ),
    Fault(
        "index-never-rebased",
        "qload/loader/formats.py",
        "return next((piece[0] for piece in cut if piece), 0)",
        "return 0",
    ),
    Fault(
        "index-unchecked",
        "qload/spec/weight.py",
        "wrong = ((index < 0) | (index >= limit)).nonzero()",
        "wrong = (index < 0).nonzero()[:0]",
    ),
    Fault(
        "int64-cast",
        "qload/weights/weights.py",
        "or tensor.dtype not in FLOATS:",
        "or tensor.dtype not in (*FLOATS, torch.int64):",
    ),
    Fault(
        "scales-cast", "qload/weights/weights.py", "if role is not Role.FLOAT or", "if role is Role.WORD or"
    ),
    Fault("overflow-unseen", "qload/weights/weights.py", "if lost.any():", "if lost.all():"),
    Fault(
        "rank-0-everywhere",
        "qload/loader/cuts.py",
        "world, rank = group.size(), group.rank()",
        "world, rank = group.size(), 0",
    ),
    Fault(
        "cut-group",
        "qload/loader/cuts.py",
        "return axis.free is None or all(",
        "return axis.free is None or any(",
    ),
    Fault(
        "cut-unchecked",
        "qload/loader/cuts.py",
        "    return place % axis.granule == 0 and",
        "    return place % 2 == 0 and",
    ),
    Fault(
        "parts-swapped",
        "qload/loader/formats.py",
        "at += extent\n",
        "at += extent\n    whole = whole.roll(extents[0], join)\n",
    ),
    Fault(
        "permutation-ignored",
        "qload/kernels/permutation.py",
        "return rows if perm is None else rows[inverse(perm)]",
        "return rows",
    ),
    Fault(
        "tail-lost",
        "qload/storage/safetensors.py",
        "run = np.empty((rows[1] - rows[0]) * row, np.uint8)",
        "run = np.zeros((rows[1] - rows[0]) * row, np.uint8)[:-1]",
    ),
    Fault("overlap-unseen", "qload/storage/header.py", "if entry.begin != at:", "if entry.begin > at:"),
    Fault(
        "nan-scale-unseen",
        "qload/verify/rules/scales.py",
        '"NaN": run.isnan(),',
        '"NaN": run.isnan() & False,',
    ),
)


def kills(fault: Fault) -> list[str]:
    """The tests that fail with this fault, of a copy of the project."""
    with tempfile.TemporaryDirectory(prefix="qload-fault-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file():
                shutil.copyfile(source, root / name)
        fault.apply(root)
        environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *TESTS], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        log.info("%s: pytest ended with %d", fault.name, done.returncode)
        return FAILED.findall(done.stdout)


def main(arguments: list[str]) -> int:
    """Run the faults named (all, if none is), print the matrix; 1 where one goes unnoticed."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    known = {fault.name: fault for fault in FAULTS}
    unknown = set(arguments) - set(known)
    if unknown:
        raise ArgumentError("fault", f"one of {', '.join(known)}", ", ".join(sorted(unknown)))
    table = Table("fault", "file", "tests killed", "such as", title="kill matrix")
    unnoticed = 0
    for fault in track([known[name] for name in arguments or known], console=Console(stderr=True)):
        killed = kills(fault)
        unnoticed += len(killed) < LEAST_KILLS
        table.add_row(fault.name, fault.file, str(len(killed)), "\n".join(killed[:2]))
    Console().print(table)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
