"""Write `qload/architecture/model_tables.json`: `python -m tests.model_tables`.

`--check` writes nothing, and fails for a file that differs from the new one. Model types as arguments
limit the work to them.
"""

import json
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "qload" / "architecture" / "model_tables.json"
LEFT_OUT = Path(__file__).parent / "left_out.json"
SECONDS, MEMORY = 60, 12 << 30  # of CPU for a type, of the process
MAX_PATTERNS = 1 << 16
WORKER = "--worker"


def main(arguments: Sequence[str]) -> int:
    """Run the generator."""
    if arguments[:1] == [WORKER]:
        work(arguments[1:])
        return 0
    types = [name for name in arguments if not name.startswith("--")]
    entries, errors = collect(types)
    import transformers

    old = json.loads(FILE.read_text()) if FILE.exists() else {"types": {}}
    old_errors = json.loads(LEFT_OUT.read_text()) if LEFT_OUT.exists() else {}
    if types:
        entries = {**{name: entry for name, entry in old["types"].items() if name not in types}, **entries}
        errors = {**{name: error for name, error in old_errors.items() if name not in types}, **errors}
    text = write_tables(transformers.__version__, entries)
    if "--check" in arguments:
        stale = sorted(
            name for name in {*entries, *old["types"]} if entries.get(name) != old["types"].get(name)
        )
        print(f"{len(entries)} types, {len(errors)} left out; different from the file: {stale}")
        return bool(stale)
    FILE.write_text(text)
    LEFT_OUT.write_text(json.dumps(dict(sorted(errors.items())), indent=0) + "\n")
    print(f"{len(entries)} types, {len(text) >> 10} KiB; left out: {len(errors)}")
    return 0


def collect(types: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries of types, of all without names, and the errors of the other types."""
    from tests.model_tables.generate import model_classes

    waiting = list(types or model_classes())
    entries: dict[str, Any] = {}
    errors: dict[str, str] = {}
    while waiting:
        for answer in answers(waiting):
            waiting.remove(answer["type"])
            if "error" in answer:
                errors[answer["type"]] = answer["error"]
            else:
                entries[answer["type"]] = answer["entry"]
            seconds = answer["seconds"]
            print(f"{answer['type']}: {answer.get('error', 'ok')[:100]}, {seconds:.1f} s", flush=True)
        if waiting:  # the process ended
            errors[waiting.pop(0)] = "the process ended: too much memory, or a fatal error"
    return entries, errors


def answers(types: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the answers of one process for types, in their order."""
    command = [sys.executable, "-m", __package__, WORKER, *types]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"type"'):
                yield json.loads(line)


def work(types: Sequence[str]) -> None:
    """Print an answer for each type."""
    import transformers

    from tests.model_tables.generate import generate, model_classes

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    re._MAXCACHE = MAX_PATTERNS  # type: ignore[attr-defined]  # transformers compiles one for each tensor
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    classes = model_classes()
    signal.signal(signal.SIGPROF, expire)
    for model_type in types:
        began = time.process_time()
        answer: dict[str, Any] = {"type": model_type}
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            answer["entry"] = generate(model_type, classes[model_type])
        except Expired:
            answer["error"] = f"more than {SECONDS} seconds of CPU"
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            answer["error"] = text[:200]
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer["seconds"] = time.process_time() - began
        print(json.dumps(answer), flush=True)


class Expired(BaseException):
    """The end of the time for a type; no error of a model."""


def expire(*_: Any) -> None:
    """End the work on a type."""
    raise Expired


def write_tables(version: str, entries: Mapping[str, Any]) -> str:
    """Return the file: a line for each part of a type, and for each row."""
    parts = [f'{{"transformers": {json.dumps(version)}, "types": {{']
    types = []
    for name, entry in sorted(entries.items()):
        lines = [f'"{key}": {json.dumps(value)}' for key, value in entry.items() if key != "rows"]
        rows = ",\n".join(f"  {json.dumps(row)}" for row in entry["rows"])
        types.append(f'"{name}": {{\n ' + ",\n ".join([*lines, f'"rows": [\n{rows}]']) + "}")
    return "\n".join([*parts, ",\n".join(types), "}}", ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
