"""Comparison of a model's kernels with the exact products of its dequantized weights, and with a reference.

`logit_check.check_logits` runs a model on a prompt. Each layer multiplies by its kernel and exactly, and the
model continues with the exact result, so that the first faulty layer does not hide later ones.
"""
