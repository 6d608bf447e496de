"""Comparison of a model's kernels with the exact products of its dequantized weights, and with a reference.

`logit_check.check_logits` runs a model on a prompt. Each layer multiplies by its kernel and exactly, and the
model continues with the exact result, so that the first faulty layer does not hide later ones.
"""

from qload.errors.rule_text import RuleText

KERNEL_PRODUCT = RuleText(
    id="kernel-product",
    stage="--logits",
    what="""
        A layer's kernel on this device computes another product than the dequantized weight. The model runs
        on a prompt with the exact products of its dequantized weights. On the inputs of each layer in this
        run, the result of its kernel is compared with the exact one. The limit is the cost of rounding: the
        weight, the inputs that a config declares as quantized, the scales of a kernel's order and the result
        are each rounded once to the type of the activations, and sums are in float32. For experts the values
        between two products count too. No tolerance is typed in. The message names the first faulty layer
        with its worst place; the comparison continues with all other layers, because the model continues with
        exact results.

        Then the weight is read back: inputs that are one at one place and zero elsewhere show the kernel's
        weight column by column, and the message gives the first (n, k) with another number. For experts the
        matrices are compared in the order of the kernel. If a known fault explains the weight that was read
        back, a further line names it: `scales of the group before: explains 100 % of 512 wrong numbers of
        512`.""",
    why="""
        A kernel, its build for one architecture, or the order of its weights can be wrong for one shape and
        right for all others. Such a model runs, and writes worse text.""",
    do="""
        The checkpoint is not at fault, unless other rules say so. Run the same with `--device cpu`. If
        nothing is found there, report the finding with the output of `qload doctor`; until then,
        `open_checkpoint(path, target=None)` multiplies by weights as they are stored.""",
    example=(
        "model.layers.1.mlp.down_proj: the kernel's product is off by 0.00822 at (token, n) = (2, 0), and "
        "rounding explains 7.25e-05; 4 of 512 values are wrong\nits kernel has -0.0773966 at (n, k) = (0, 0) "
        "of model.layers.1.mlp.down_proj, the checkpoint -0.00415446"
    ),
)

AGAINST_OUTPUT = RuleText(
    id="against-output",
    stage="--logits",
    what="""
        With `--against` too: on the inputs of a layer in the reference's model, its outputs are too far from
        the reference's. Quantized layers always differ from the float original. A layer is a finding only

        - if its outputs are no closer to the reference's than zeros are, a relative error of 1 or more,
        - or if it is an outlier among its siblings, the layers of the same name in other blocks with the same
          storage: the square of its relative error is more than 64 times the mean of theirs, the limit of
          [against-value](against-value.md) for a block of weights.

        The message names the first such layer, with the place of the largest difference of its weight. Notes
        give the distance of the logits of both models: the largest difference as a part of their range, the
        number of tokens with the same likeliest next token, and the mean KL divergence.""",
    why="""
        Weights can be near to the original and still be wrong for large inputs. Outputs show the loss of the
        model, and its first layer.""",
    do="""
        Read the [against-value](against-value.md) finding of the same layer, and write the layer again. A
        layer without such a mistake, but with outliers in its inputs, may be better left plain.""",
    example=(
        "model.layers.1.mlp.gate_proj: its outputs have a relative error of 1.37, no closer to the "
        "reference's than zeros are\nits weight differs most at (n, k) = (89, 35) of "
        "model.layers.1.mlp.gate_proj: -0.210693, the reference has 0.270369"
    ),
)
