"""What a conversion vouches for: which files were read and written, and that each layer means the same."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from qload.conversion.report import WrittenCheckpoint

SCHEMA = 1


def certificate(
    found: WrittenCheckpoint,
    asked: Mapping[str, Any],
    source: Mapping[str, str],
    written: Mapping[str, str],
) -> dict[str, Any]:
    """As plain data, without a time or a place, so that one conversion has one certificate.

    `asked`: what was asked for; `source`, `written`: the hash of each file that was read, or written.
    """
    return {
        "schema": SCHEMA,
        "qload": version(),
        **asked,
        "source": dict(sorted(source.items())),
        "files": dict(sorted(written.items())),
        "counts": found.counts,
        "notes": list(found.notes),
        "layers": [asdict(layer) for layer in found.layers],
    }


def version() -> str:
    """Of qload; "" of a source tree that is not installed."""
    try:
        return metadata.version("qload-weights")
    except metadata.PackageNotFoundError:
        return ""
