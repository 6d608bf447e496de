"""vLLM's quantization method `qload` (`--quantization qload`), for checkpoints of every supported format.

vLLM calls `register` and `register_kernel` as plug-ins. Nothing of vLLM is imported before.
"""

__all__ = ["register", "register_kernel"]


def register() -> None:
    """Register `qload` as a quantization method of vLLM; a second call changes nothing.

    ArgumentError if this vLLM lacks a required name; an untested version is logged.
    """
    from qload.engines.vllm.hooks import QUANTIZATION, REGISTRATION_HOOKS, check_hooks, check_version, hook

    check_version()
    check_hooks(REGISTRATION_HOOKS)
    if "qload" not in hook(QUANTIZATION, "QUANTIZATION_METHODS"):
        from qload.engines.vllm.config import QloadQuantizationConfig

        hook(QUANTIZATION, "register_quantization_config")("qload")(QloadQuantizationConfig)


def register_kernel() -> None:
    """Insert qload's kernel before vLLM's own, for 4 and 8 bit layers that vLLM loads itself.

    Only if `VLLM_PLUGINS` names `qload_kernel`, as it changes the kernel of models that do not use qload; a
    second call changes nothing. ArgumentError as in `register`.
    """
    from qload.engines.vllm.hooks import check_version, hook

    if "qload_kernel" in (hook("vllm.envs", "VLLM_PLUGINS") or ()):
        from qload.engines.vllm.kernel import put_first

        check_version()
        put_first()
