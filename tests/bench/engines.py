"""How long a model takes to load through transformers, beside its layers alone, and the memory of the host.

    python -m tests.bench.engines FOLDER        of a checkpoint that was read before, so that no disk counts

Each load is a process of its own, as the peak of memory is a process'.
"""

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

WAYS = ("layers", "transformers")


def layers(folder: Path) -> None:
    """open_checkpoint, and the typed weights of all layers."""
    from qload import open_checkpoint
    from qload.listing import Groups

    with open_checkpoint(folder, target="auto") as weights:
        held = [weights.get_weights(prefix) for prefix in Groups(weights).found]
    assert held


def transformers(folder: Path) -> None:
    """The model, ready to be called."""
    from qload.engines.transformers import load

    assert load(folder).num_parameters()


def measure(way: str, folder: Path) -> None:
    """Print the seconds of one load, imports left out, and how many bytes the process grew by at most."""
    __import__("qload.engines.transformers" if way == "transformers" else "qload.listing")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    {"layers": layers, "transformers": transformers}[way](folder)
    seconds = time.perf_counter() - begun
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print(f"{seconds} {grown}")


def main(arguments: list[str]) -> None:
    """The median of some loads of each way, in turns."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engines", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args(arguments)
    if asked.way:
        measure(asked.way, asked.folder)
        return
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
    for _ in range(asked.runs):
        for way in WAYS:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.bench.engines",
                str(asked.folder),
                "--way",
                way,
            ]
            last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[-2]
            seconds, grown = last.split()
            found[way].append((float(seconds), int(grown)))
    stored = sum(file.stat().st_size for file in asked.folder.glob("*.safetensors"))
    print(f"checkpoint {stored / 2**20:.0f} MiB")
    middles = {way: sorted(times)[len(times) // 2][0] for way, times in found.items()}
    for way, times in found.items():
        share, peak = middles[way] / middles["layers"], max(grown for _, grown in times)
        print(
            f"{way:14}{middles[way]:8.2f} s {share:6.2f} of layers {peak / stored:6.2f} bytes a stored byte"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
