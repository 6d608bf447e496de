"""Frozen vectors: small checkpoints with what they mean, and others that have to be refused, as files."""

from qload.testing.vectors.export import export
from qload.testing.vectors.manifest import VERSION, Manifest, VectorCase, VectorFile

__all__ = ["VERSION", "Manifest", "VectorCase", "VectorFile", "export"]
