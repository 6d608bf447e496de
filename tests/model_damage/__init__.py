"""Tiny models of every type of the tables: verified, run on qload in five formats, and damaged on purpose."""
