"""Frozen vectors: small checkpoints as files, with the weights that they store, and some to be refused."""

from qload.testing.vectors.export import VERSION, Manifest, VectorCase, VectorFile, export

__all__ = ["VERSION", "Manifest", "VectorCase", "VectorFile", "export"]
