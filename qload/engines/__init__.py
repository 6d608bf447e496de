"""What other programs need to run on qload; each engine is an extra, and nothing of it is imported until it is asked for."""
