"""Frozen vectors: small checkpoints as files with their expected weights, and damaged ones."""

from qload.testing.vectors.export import VERSION, Manifest, VectorCase, VectorFile, export

__all__ = ["VERSION", "Manifest", "VectorCase", "VectorFile", "export"]
