"""What this machine has, what kie will use, what is missing and the command that mends it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kie import _kie, bandwidth
from kie.engine import compiler_folders
from kie.errors import KieError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is missing."""

    what: str
    """The missing part and what it costs."""
    command: str
    """What mends it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that kie can use."""

    name: str
    """What `device=` calls it."""
    model: str
    """What a person would call it."""
    arch: str
    """Architecture that kernels are compiled for."""
    multiprocessors: int
    """Multiprocessors, one block of the kernel each."""
    memory_bytes: int
    """Memory of the device."""
    free_bytes: int
    """Memory that is free now."""
    read_bandwidth: float | None
    """Bytes a second that a kernel reads from its memory, None where it was not measured: not asked
    for, no compiler, or less than 2 GiB free."""


@dataclass(frozen=True, slots=True)
class Report:
    """The report of `kie.doctor()`."""

    kie: str
    """Version of kie."""
    python: str
    """Version of Python."""
    system: str
    """Operating system, release and machine."""
    cpu: str
    """Name of the processor."""
    cores: int
    """Cores that this process may use."""
    isa: str
    """Instruction set that the kernels use."""
    memory_bytes: int
    """Memory of the machine."""
    memory_free_bytes: int
    """Memory that is available now, within the limit of the control group."""
    read_bandwidth: float | None
    """Bytes a second that all cores read from memory, None where it was not measured: not asked
    for, or no room for a buffer that no cache holds."""
    gpus: tuple[Gpu, ...]
    """GPUs that can be used, as their drivers see them."""
    topology: str | None
    """The GPUs and what lies between them, as printed; None without GPUs."""
    gpu_nodes: tuple[str, ...]
    """Device nodes of GPUs, whether or not a driver serves them."""
    libcuda: str | None
    """Version of the CUDA driver API that libcuda.so.1 reports, None if it is not there."""
    nvrtc: bool
    """Whether the CUDA run-time compiler is installed."""
    compiler: str | None
    """A C++ compiler, needed only by `device="sim"`."""
    hub: str | None
    """Version of huggingface_hub, None if it is not installed."""
    will_use: str
    """What `device="auto"` means here."""
    missing: tuple[Finding, ...]
    """What is missing, with the command that mends it."""

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, nested."""
        return asdict(self)


def report(measure: bool = True) -> Report:
    """Looks at this machine. Opens no engine and changes nothing.

    `measure=False` leaves out read bandwidths, which take a second and 1 GB, and on each GPU half a
    second and up to 4 GiB.
    """
    cpu, isa, total, free, threads = _kie.host()
    nodes = tuple(sorted(str(node) for node in Path("/dev").glob("nvidia[0-9]*")))
    if Path("/dev/kfd").exists():
        nodes += tuple(sorted(str(node) for node in Path("/dev/dri").glob("renderD*")))
    found, refused = _kie.gpus()
    gpus = tuple(Gpu(*gpu, _gpu_bandwidth(gpu[0]) if measure else None) for gpu in found)
    linked = _kie.topology() if found else None
    libcuda = _libcuda()
    nvrtc = _installed("nvidia-cuda-nvrtc") or _installed("nvidia-cuda-nvrtc-cu12")
    return Report(
        kie=_kie.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        isa=isa,
        memory_bytes=total,
        memory_free_bytes=free,
        read_bandwidth=_read_bandwidth(free) if measure else bandwidth.known(),
        gpus=gpus,
        topology=linked[0] if linked else None,
        gpu_nodes=nodes,
        libcuda=libcuda,
        nvrtc=nvrtc is not None,
        compiler=_kie.compiler(),
        hub=_installed("huggingface_hub"),
        will_use=_auto(gpus, f"cpu ({isa}, {threads} {'thread' if threads == 1 else 'threads'})"),
        missing=_missing(nodes, libcuda, nvrtc is not None, refused),
    )


def _gpu_bandwidth(name: str) -> float | None:
    try:
        return _kie.gpu_bandwidth(name, compiler_folders(name))
    except KieError:  # without a compiler; what is missing is said elsewhere
        return None


def _auto(gpus: tuple[Gpu, ...], cpu: str) -> str:
    """What `device="auto"` is: the first NVIDIA GPU, for models that it takes."""
    first = next((gpu for gpu in gpus if gpu.name == "cuda:0"), None)
    if first is None:
        return cpu
    return f"{first.name} ({first.model}); {cpu} for what it does not take"


def _missing(
    nodes: tuple[str, ...], libcuda: str | None, nvrtc: bool, refused: list[str]
) -> tuple[Finding, ...]:
    found = [Finding(why, 'mend what it names, or pass device="cpu"') for why in refused]
    nvidia = any(node.startswith("/dev/nvidia") for node in nodes)
    if nvidia and libcuda is None:
        what = "an NVIDIA GPU is present but libcuda.so.1 is not: the driver is not installed"
        found.append(Finding(what, "install the NVIDIA driver, e.g. `apt install nvidia-driver`"))
    if nvidia and not nvrtc:
        what = "an NVIDIA GPU is present but the run-time compiler is not"
        found.append(Finding(what, "pip install 'kie[cuda]'"))
    if _installed("huggingface_hub") is None:
        what = "huggingface_hub is not installed: hub ids cannot be downloaded"
        found.append(Finding(what, "pip install 'kie[hub]'"))
    return tuple(found)


def _libcuda() -> str | None:
    import ctypes

    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int(0)
        library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _installed(distribution: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def measure_bandwidth() -> float | None:
    """Bytes a second that all cores read from memory; kept for engines that are opened later."""
    return _read_bandwidth(_kie.host()[3])


def _read_bandwidth(free: int) -> float | None:
    """Read from 1 GB, or from a quarter of what is free; from less it would be a cache's."""
    gigabytes = min(1.0, free / 4e9)
    if gigabytes < 0.125:
        return None
    try:
        found = _kie.read_bandwidth(gigabytes=gigabytes)
    except (MemoryError, OSError):
        return None
    bandwidth.keep(found)
    return found
