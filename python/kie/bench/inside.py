"""A decode step from inside the kernel: its phases, what it takes without waits or weights, and how
long the host takes to answer a token."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal

from kie import _kie, hub
from kie.bench.report import spread
from kie.engine import compiler_folders
from kie.errors import InvalidRequestError

KERNELS = ("full", "trace", "stream_only", "exchange_only", "alone")
"""The usual kernel; the same with its phases told; nobody waits for others' words; nobody waits
for weights; of several GPUs each by itself, its own words for those of the others. All but the
first two compute garbage, of which nothing but times is handed out."""


def measure(
    model: str | os.PathLike[str] | None = None,
    *,
    device: str,
    dtype: Literal["auto", "f32", "f16", "bf16"] = "auto",
    max_seq_len: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    prompt_tokens: int = 128,
    max_tokens: int = 256,
    runs: int = 5,
) -> dict[str, Any]:
    """Times of `runs` requests of each kernel, by the device's clock, in an engine of its own.

    Each kernel's steps are under its name in microseconds (p50 to max; "alone" of several GPUs
    only), `phases` has the time and the weights' bytes of each phase.

    Raises:
        NoDeviceError: the CPU, whose passes are timed from outside.
        LoadError, UnsupportedModelError, DeviceError, OutOfMemoryError, InvalidRequestError.
    """
    text = _kie.measure(
        hub.resolve(model).folder,
        device=device,
        dtype=dtype,
        max_seq_len=max_seq_len,
        cache_dir=cache_dir,
        nvrtc_dirs=compiler_folders(device),
        prompt_tokens=prompt_tokens,
        tokens=max_tokens,
        runs=runs,
    )
    found: dict[str, Any] = json.loads(text)
    for kernel in KERNELS:
        steps = [us for run in found.pop(kernel) for us in run]
        if steps:
            found[kernel] = {"mean": sum(steps) / len(steps), **spread(steps)}
    return found


def echo(
    device: str, *, rounds: int = 10_000, cache_dir: str | os.PathLike[str] | None = None
) -> dict[str, float]:
    """Round trips of a token: the device tells of it, the host answers, the device times both.
    Microseconds, from p50 to max.

    Raises:
        NoDeviceError: the CPU, which is the host itself.
        DeviceError, InvalidRequestError.
    """
    if rounds < 1:
        raise InvalidRequestError(f"rounds must be at least 1, got {rounds}")
    folders = compiler_folders(device)
    times = _kie.echo(device=device, cache_dir=cache_dir, nvrtc_dirs=folders, rounds=rounds)
    return spread(times)


def table(found: Mapping[str, Any]) -> str:
    """For a terminal: the kernels' steps, then the phases of the traced one."""
    size = found["bytes_per_token"]
    lines = [
        f"{found['device_model']}, {found['blocks']} blocks, context {found['prompt_tokens']}, "
        f"{size / 1e9:.3f} GB a step",
        f"{'kernel':34}{'p50 us':>10}{'p99 us':>10}{'max us':>10}{'GB/s':>9}",
    ]
    for kernel in (kernel for kernel in KERNELS if kernel in found):
        us = found[kernel]
        rate = "" if kernel == "exchange_only" else _rate(size, us["p50"])
        name = kernel.replace("_", " ")
        lines.append(f"{name:34}{us['p50']:10.1f}{us['p99']:10.1f}{us['max']:10.1f}{rate:>9}")
    lines += ["", f"{'phase of a step, over blocks':34}{'mean us':>10}{'min us':>10}{'max us':>10}"]
    lines[-1] += f"{'GB/s':>9}{'share':>8}"
    total = sum(phase["us_mean"] for phase in found["phases"])
    for phase in found["phases"]:
        mean = phase["us_mean"]
        rate = _rate(phase["bytes"], mean) if phase["bytes"] else ""
        lines.append(
            f"{phase['name']:34}{mean:10.2f}{phase['us_min']:10.2f}{phase['us_max']:10.2f}"
            f"{rate:>9}{mean / total if total else 0:>8.1%}"
        )
    lines.append(f"{'all':34}{total:10.2f}{'':20}{_rate(size, total):>9}{1:>8.1%}")
    return "\n".join(lines)


def _rate(size: int, us: float) -> str:
    """Gigabytes a second."""
    return f"{size / us / 1e3:.0f}" if us else ""
