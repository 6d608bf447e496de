"""What a conversion vouches for: which files were read and written, and that each layer means the same."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any

from qload.conversion.report import Conversion

SCHEMA = 1


def certificate(found: Conversion, source: Mapping[str, str], written: Mapping[str, str]) -> dict[str, Any]:
    """As plain data, without a time or a place, so that one conversion has one certificate.

    `source`, `written`: the hash of each file that was read, and that was written.
    """
    return {
        "schema": SCHEMA,
        "qload": version(),
        "to": found.to,
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
