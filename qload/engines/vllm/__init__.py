"""qload as a quantization of vLLM: `--quantization qload`, for checkpoints of every format that qload reads.

vLLM calls `register` and `register_kernel` by itself, as plug-ins. Nothing of vLLM is imported before.
"""

__all__ = ["register", "register_kernel"]


def register() -> None:
    """Make `qload` a quantization of vLLM; a second call changes nothing.

    ArgumentError where this vLLM lacks what it takes, by its name; a version that was not tried is logged.
    """
    from qload.engines.vllm.hooks import QUANTIZATION, TO_REGISTER, check_hooks, check_version, hook

    check_version()
    check_hooks(TO_REGISTER)
    if "qload" not in hook(QUANTIZATION, "QUANTIZATION_METHODS"):
        from qload.engines.vllm.config import QloadQuantizationConfig

        hook(QUANTIZATION, "register_quantization_config")("qload")(QloadQuantizationConfig)


def register_kernel() -> None:
    """Put qload's kernel before vLLM's own, for 4 and 8 bit layers that vLLM reads itself.

    Only where `VLLM_PLUGINS` names `qload_kernel`, as it changes what runs models that ask for nothing; a
    second call changes nothing. ArgumentError as of `register`.
    """
    from qload.engines.vllm.hooks import check_version, hook

    if "qload_kernel" in (hook("vllm.envs", "VLLM_PLUGINS") or ()):
        from qload.engines.vllm.kernel import put_first

        check_version()
        put_first()
