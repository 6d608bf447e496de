"""Faults of models: positions, masks, sinks, pages, and sums over ranks."""

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "rope-turns-others",
        "qload/models/rope.py",
        "rotate_pairs if pairs else rotate_halves",
        "rotate_halves if pairs else rotate_pairs",
    ),
    Fault("rope-turns-back", "qload/models/rope.py", "b, sin, value=-1, out", "b, sin, value=1, out"),
    Fault(
        "rope-mixes-all-waves",
        "qload/models/rope.py",
        "share = ((rotations - low_end) / (high_end - low_end)).clamp(0, 1)",
        "share = (rotations - low_end) / (high_end - low_end)",
    ),
    Fault("window-one-wider", "qload/models/kv_cache.py", "at > queries - window", "at >= queries - window"),
    Fault(
        "chunks-reach-back",
        "qload/models/kv_cache.py",
        "at // chunk == queries // chunk",
        "at >= queries - chunk",
    ),
    Fault(
        "sinks-at-zero", "qload/models/attention.py", "column = sinks.float()", "column = 0 * sinks.float()"
    ),
    Fault(
        "heads-grouped-by-turns",
        "qload/models/attention.py",
        "q.view(S, Q, kv, group, -1).permute(0, 2, 3, 1, 4)",
        "q.view(S, Q, group, kv, -1).permute(0, 3, 2, 1, 4)",
    ),
    Fault(
        "pages-sorted",
        "qload/models/kv_cache.py",
        "cells.index_select(0, pages.flatten())",
        "cells.index_select(0, pages.sort().values.flatten())",
    ),
    Fault(
        "temperature-late",
        "qload/models/attention.py",
        "(positions.float() + 1.0) / floor",
        "positions.float() / floor",
    ),
    Fault(
        "sinks-of-the-first-rank",
        "qload/models/attention.py",
        "[start : start + queries]",
        "[:queries]",
    ),
    Fault(
        "shared-expert-lost",
        "qload/models/feed_forward.py",
        "y if self.shared is None else y + self.shared(x)",
        "y",
    ),
    Fault("step-kept-beyond-its-pass", "qload/models/decoder.py", "step = step.begun()", "step = step"),
    Fault(
        "window-for-every-layer",
        "qload/models/config.py",
        "Mask(window if layer in sliding else None)",
        "Mask(window)",
    ),
)
