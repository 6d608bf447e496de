"""Models over typed weights: what `qload run` runs and `qload verify --logits` compares."""
