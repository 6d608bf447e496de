"""Comparison of a model's kernels with the exact products of its dequantized weights, and with a reference.

`logit_check.check_logits` runs a model on a prompt. Each layer multiplies by its kernel and exactly, and the
model continues with the exact result, so that the first faulty layer does not hide later ones.
"""

from qload.errors.rule_text import RuleText

KERNEL_PRODUCT = RuleText(
    id="kernel-product",
    stage="--logits",
    what="""
        On the inputs of a run on a prompt, a layer's kernel computes another product than the dequantized
        weight. The limit is the cost of rounding: weight, declared inputs, scales of the kernel's order,
        values between two products of experts and result are each rounded once to the type of the
        activations; sums are in float32. The message names the first faulty layer with its worst place.
        Later layers are compared too, on exact inputs.

        Then one-hot inputs read the kernel's weight back (for experts, the matrices in the kernel's
        order). The message gives the first wrong (n, k), and the known fault that explains it: `scales of
        the group before: explains 100 % of 512 wrong numbers of 512`.""",
    why="""
        A kernel can be wrong for one shape or architecture alone. Such a model runs, and writes worse
        text.""",
    do="""
        The checkpoint is not at fault, unless other rules say so. Run the same with `--device cpu`. If
        nothing is found there, report the finding with the output of `qload doctor`; until then,
        `open_checkpoint(path, target=None)` multiplies by weights as they are stored.""",
    example=(
        "model.layers.1.mlp.down_proj: the kernel's product is off by 0.00822 at (token, n) = (2, 0), and"
        " rounding explains 7.25e-05; 4 of 512 values are wrong"
    ),
)

AGAINST_OUTPUT = RuleText(
    id="against-output",
    stage="--logits",
    what="""
        With `--against` too: on the inputs of a layer in the reference's model, its outputs are too far
        from the reference's. A quantized layer is a finding only

        - if its outputs are no closer than zeros, a relative error of 1 or more,
        - or if its squared relative error is more than 64 times the mean of its siblings: the layers of
          the same name and storage in other blocks.

        The message names the first such layer, with the largest difference of its weight. Notes give the
        distance of the logits: largest difference, agreement of the likeliest token, and mean KL
        divergence.""",
    why="Weights near to the original can still be wrong for large inputs.",
    do="""
        Read the [against-value](against-value.md) finding of the same layer, and write the layer again. A
        layer without such a mistake, but with outliers in its inputs, may be better left plain.""",
    example=(
        "model.layers.1.mlp.gate_proj: its outputs have a relative error of 1.37, no closer to the "
        "reference's than zeros are"
    ),
)
