"""Faults of models: latent attention, scales of YaRN, padded heads and vision."""

from tests.faults.fault import Fault

_LATENT = "qload/models/attention.py"
_ROPE = "qload/models/rope.py"
_VISION = "qload/models/vision.py"

FAULTS = (
    Fault(
        "pairs-in-halves-always",
        _LATENT,
        "rotary = pairs_as_halves(rotary) if sizes.interleaved else rotary",
        "rotary = pairs_as_halves(rotary)",
    ),
    Fault(
        "values-before-keys",
        _LATENT,
        "k, v = both.split([sizes.nope_size, sizes.value_size], -1)",
        "v, k = both.split([sizes.value_size, sizes.nope_size], -1)",
    ),
    Fault(
        "latent-bias-not-missed",
        _LATENT,
        "check_biases(weights, name, config.biases)\n        heads",
        "heads",
    ),
    Fault("yarn-ramp-inwards", _ROPE, "math.floor(low), math.ceil(high)", "math.ceil(low), math.floor(high)"),
    Fault(
        "yarn-slow-and-fast",
        _ROPE,
        "low, high = pair_with(config.beta_fast), pair_with(config.beta_slow)",
        "low, high = pair_with(32.0), pair_with(1.0)",
    ),
    Fault(
        "yarn-all-dim-of-1",
        _ROPE,
        "0.0 if mscale_all_dim is None else mscale_all_dim",
        "1.0 if mscale_all_dim is None else mscale_all_dim",
    ),
    Fault("softmax-scaled-once", _LATENT, "* growth * growth", "* growth"),
    Fault(
        "padded-values-kept",
        "qload/models/kv_cache.py",
        "return heads[..., :size]",
        "return heads[..., heads.shape[-1] - size :]",
    ),
    Fault("patch-by-one-pixel", _VISION, "patches.all(-1).all(-1)", "patches.any(-1).any(-1)"),
    Fault(
        "columns-before-rows",
        _VISION,
        "rows[:, :, None] * side + columns[:, None, :]",
        "rows[:, :, None] + side * columns[:, None, :]",
    ),
    Fault(
        "sight-quantized",
        _VISION,
        "use_loader(DefaultWeightsLoader())",
        "use_loader(opened.loader)",
    ),
    Fault(
        "resampler-without-itself",
        _VISION,
        "latents_mask = mask.new_ones(",
        "latents_mask = mask.new_zeros(",
    ),
)
