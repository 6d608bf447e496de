"""Faults of MLX: words, biases, modes of floats, entries of modules."""

from tests.faults.fault import Fault

_MLX = "qload/formats/mlx.py"

FAULTS = (
    Fault("mlx-biases-subtracted", _MLX, "offsets=-self.biases", "offsets=self.biases"),
    Fault(
        "mlx-entry-of-stack-lost",
        _MLX,
        'EXPERT.sub(".switch_mlp.", module) in',
        "module in",
    ),
    Fault(
        "mlx-e4m3-scales-as-exponents",
        _MLX,
        "if is_e4m3 else fp4.e8m0",
        "if False else fp4.e8m0",
    ),
    Fault(
        "mlx-codes-within-words",
        _MLX,
        "codes=rows(self.config.bits, dense=True)",
        "codes=rows(self.config.bits, dense=False)",
    ),
    Fault("mlx-high-nibble-first", _MLX, "stored, high_first=False", "stored, high_first=True"),
    Fault(
        "mlx-e4m3-as-e5m2", _MLX, "else byte_values(torch.float8_e4m3fn", "else byte_values(torch.float8_e5m2"
    ),
    Fault("mlx-integers-of-added-biases", _MLX, "offsets=-biases)", "offsets=biases)"),
    Fault("mlx-biases-restored-negated", _MLX, "biases=-integers.offsets", "biases=integers.offsets"),
    Fault(
        "mlx-entries-as-the-whole",
        _MLX,
        "_format(entry, configs.validate(_Entry, entry))",
        "_format(source, section)",
    ),
    Fault("mlx-false-entry-quantized", _MLX, "elif value is False:", "elif value == []:"),
    Fault("mlx-transformers-names", _MLX, 'stored=("biases", "qbiases"), ', ""),
)
