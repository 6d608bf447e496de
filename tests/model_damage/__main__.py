"""Try every type of the tables: `python -m tests.model_damage` prints the page docs/types.md.

`--write` writes the page and the outcomes that it has. Types as arguments limit the run to them; the outcomes
of other types stay.
"""

import json
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.model_damage.page import OUTCOMES, PAGE, page, read_outcomes

SECONDS = 120  # of a type


def main(arguments: Sequence[str]) -> int:
    """Run the trials."""
    import torch
    import transformers

    from tests.model_damage.trial import model_types

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    types = [name for name in arguments if not name.startswith("--")]
    outcomes = read_outcomes()["types"] if types else {}
    for kind in types or model_types():
        began = time.process_time()
        outcomes[kind] = outcome_of(kind)
        print(f"{kind}: {time.process_time() - began:.1f} s, {outcomes[kind]}", file=sys.stderr, flush=True)
        stored = {"transformers": transformers.__version__, "types": dict(sorted(outcomes.items()))}
        if "--write" in arguments:
            write(stored)
    if "--write" not in arguments:
        print(page(stored))
    return 0


def write(stored: Mapping[str, Any]) -> None:
    """Write the outcomes, a line for each type, and the page."""
    lines = ",\n".join(f"{json.dumps(kind)}: {json.dumps(each)}" for kind, each in stored["types"].items())
    version = json.dumps(stored["transformers"])
    OUTCOMES.write_text(f'{{"transformers": {version}, "types": {{\n{lines}\n}}}}\n')
    PAGE.write_text(page(stored))


def outcome_of(kind: str) -> dict[str, Any]:
    """Return the outcome of a type: its trial without kinds that do not apply, or an error."""
    from tests.model_damage.trial import brief, try_type
    from tests.model_tables.__main__ import Expired, expire

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(SECONDS)
    try:
        with tempfile.TemporaryDirectory(prefix="qload-damage-") as folder:
            outcome = asdict(try_type(kind, Path(folder)))
    except Expired:
        return {"error": f"more than {SECONDS} seconds"}
    except Exception as error:  # of a class of transformers
        return {"error": brief(error)}
    finally:
        signal.alarm(0)
    del outcome["inapplicable"]
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
