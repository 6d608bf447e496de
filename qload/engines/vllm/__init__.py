"""qload as a quantization of vLLM: `--quantization qload`, for checkpoints of every format that qload reads.

vLLM calls `register` and `register_kernel` by itself, as plug-ins. Nothing of vLLM is imported before.
"""

__all__ = ["register", "register_kernel"]


def register() -> None:
    """Make `qload` a quantization of vLLM; a second call changes nothing.

    ArgumentError where this vLLM lacks what it takes, by its name; a version that was not tried is logged.
    """
    from qload.engines.vllm.config import QloadConfig
    from qload.engines.vllm.hooks import check_version, hook

    check_version()
    quantizations = "vllm.model_executor.layers.quantization"
    if "qload" not in hook(quantizations, "QUANTIZATION_METHODS"):
        hook(quantizations, "register_quantization_config")("qload")(QloadConfig)


def register_kernel() -> None:
    """Put qload's kernel before vLLM's own, for 4 and 8 bit layers that vLLM reads itself.

    Only where `VLLM_PLUGINS` names `qload_kernel`, as it changes what runs models that ask for nothing; a
    second call changes nothing. ArgumentError as of `register`.
    """
    import os

    if "qload_kernel" in os.environ.get("VLLM_PLUGINS", "").split(","):
        from qload.engines.vllm.hooks import check_version
        from qload.engines.vllm.kernel import put_first

        check_version()
        put_first()
