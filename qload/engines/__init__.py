"""What other programs need to run on qload; each engine is an extra.

Nothing of an engine is imported until it is asked for.
"""
