"""The plug-in for vLLM: what its entry points name.

vLLM asks for a platform (``platform``), and lets packages register classes (``register``), in its parent process,
its engine core and its workers alike. Kernels run in workers alone, which load ``backend``.
"""

from __future__ import annotations

import multiprocessing
import os

# Releases whose classes these modules extend.
SUPPORTED = (0, 32)
# How vLLM's processes that run the model are called.
_WORKER = "VllmWorker"
SWITCH = "NUMBA_MLA_VLLM"
_PACKAGE = "numba_mla.integrations.vllm"
BACKEND = f"{_PACKAGE}.backend.NumbaMLABackend"
PREFILL_BACKEND = f"{_PACKAGE}.prefill.NumbaMLAPrefillBackend"


def platform() -> str | None:
    """Return the class of platform for vLLM to use on a CPU; None where it is not ours to say."""
    if not is_on():
        return None
    from vllm.platforms import cpu_platform_plugin

    own = cpu_platform_plugin()
    if own is None:
        return None
    name = "NumbaZenCpuPlatform" if own.endswith(".ZenCpuPlatform") else "NumbaCpuPlatform"
    return f"{_PACKAGE}.platforms.{name}"


def register() -> None:
    """Put this package's backend in the place of vLLM's own for MLA on CPUs.

    So it is found too where the platform is not asked for: with VLLM_TARGET_DEVICE=cpu. What another plug-in has put
    there stays.
    """
    if not is_on():
        _say_why_not()
        return
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for backend in (AttentionBackendEnum.CPU_MLA, AttentionBackendEnum.AMX_MLA):
        if not backend.is_overridden():
            register_backend(backend, BACKEND)
    for prefill_backend in (MLAPrefillBackendEnum.CPU, MLAPrefillBackendEnum.ZEN_CPU):
        if not prefill_backend.is_overridden():
            register_mla_prefill_backend(prefill_backend, PREFILL_BACKEND)
    if multiprocessing.current_process().name.startswith(_WORKER):
        _share_cores_with_torch()


def _share_cores_with_torch() -> None:
    """Have Numba, not loaded yet, run on the OpenMP threads that torch runs on, unless the user says otherwise.

    vLLM tells OpenMP which cores a worker owns. That library pins the main thread to the first of them, which is
    then all that Numba would count, and all that threads of its own would be given.
    """
    os.environ.setdefault("NUMBA_THREADING_LAYER", "omp")
    owned = os.environ.get("OMP_NUM_THREADS", "")
    if owned.isdigit():
        os.environ.setdefault("NUMBA_NUM_THREADS", owned)


def is_on() -> bool:
    """Whether the plug-in takes part: a vLLM that it knows, and not switched off."""
    return os.environ.get(SWITCH) != "0" and _version()[:2] == SUPPORTED


def _version() -> tuple:
    from vllm.version import __version_tuple__

    return tuple(__version_tuple__)


def _say_why_not() -> None:
    """One line, in the process that the user started, if it is not the user's own wish."""
    if os.environ.get(SWITCH) == "0" or multiprocessing.parent_process() is not None:
        return
    from vllm.logger import init_logger

    expected, found = (".".join(map(str, version)) for version in (SUPPORTED, _version()))
    init_logger("vllm.numba_mla").warning(
        "numba_mla: off, because it extends vLLM %s.* and this is %s; %s=0 silences this line", expected, found, SWITCH
    )
