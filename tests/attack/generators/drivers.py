"""Drivers of GPUs that fail at one call of an engine's life, or from it on: whatever the call and
its code, the engine says so in a typed error, what it took is given back, and the next one works.

The driver is driver.cc: no GPU, and every call of the CUDA driver, NVRTC, the HIP runtime and
hipRTC that kie makes.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import kie
from generators._shared import ATTACK, ROOT, TINY

Case = dict[str, Any]
LIMIT_BYTES = 64 << 30
LIMIT_SECONDS = 60.0

SONAMES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so.7"}
COMPILERS = {"cuda": "KIE_NVRTC", "hip": "KIE_HIPRTC"}
DEVICES = ("cuda:0", "cuda:0", "cuda:0,1", "hip:0")
CODES = (1, 2, 3, 46, 100, 201, 209, 214, 500, 700, 702, 710, 719, 801, 999, 9999, -1)
"""Invalid value, out of memory, not initialised, device unavailable and lost, a launch that failed
or timed out; what no header knows.
"""
CPP = {"u64": "u64", "u32": "u32", "u8": "u8", "i64": "long", "i32": "int", "f32": "float"}
PROMPT = [5, 6, 7] * 9
ANSWER = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
OPTIONS = {"max_seq_len": 256, "max_batch": 2, "kv_bytes": 1 << 22}

BLIND = ("EventQuery", "EventRecord", "CtxPushCurrent", "hipGetDevice", "hipSetDevice")
"""Calls without which nobody knows whether a kernel has ended, or whose memory it is: what it may
still use stays.
"""
OTHERWISE = {
    2: ("Alloc", "Malloc", "ModuleLoad"),
    500: ("ModuleGetFunction",),
    600: ("EventQuery",),
}
"""Codes that have errors of their own at some calls: out of memory, no such kernel."""


def packed(value: object) -> bytes:
    """A value in MessagePack, as far as notes of code objects need it."""
    if isinstance(value, int):
        return b"\xcd" + struct.pack(">H", value)
    if isinstance(value, str):
        return b"\xd9" + bytes([len(value)]) + value.encode()
    if isinstance(value, list):
        return b"\xdc" + struct.pack(">H", len(value)) + b"".join(map(packed, value))
    assert isinstance(value, dict)
    return bytes([0x80 | len(value)]) + b"".join(packed(k) + packed(v) for k, v in value.items())


def code_object(decode_bytes: int) -> bytes:
    """An ELF file with one note: the kernels that it is said to have."""
    kernels = [
        {
            ".args": [{".size": size, ".value_kind": "by_value"}],
            ".name": name,
            ".vgpr_count": 100,
            ".max_flat_workgroup_size": 1024,
            ".wavefront_size": 64,
        }
        for name, size in (("kie_decode", decode_bytes), ("kie_pack", 32))
    ]
    note = packed({"amdhsa.kernels": kernels})
    notes = struct.pack("<III8s", 7, len(note), 32, b"AMDGPU") + note
    notes += bytes(-len(notes) % 4)
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 1)
    program = bytearray(56)
    program[0] = 4
    struct.pack_into("<Q", program, 8, 120)
    struct.pack_into("<Q", program, 32, len(notes))
    return bytes(header + program) + notes


def declarations() -> str:
    """The structures of mono/wire.rs in C++, as the kernels' generated header has them."""
    folder = ROOT / "crates" / "kie-kernels" / "src" / "mono"
    text = (folder / "wire.rs").read_text(encoding="utf-8")
    files = dict.fromkeys(("FIRST_POOLS", "MORE_POOLS"), folder / "lower" / "model.rs")
    files["DRAFT_MAX"] = folder.parent / "lookup.rs"
    out = [f"enum {{ {name} = {length(file, name)} }};" for name, file in files.items()]
    structures = re.findall(r'^    (\w+) as "(\w+)" \{\n(.*?)\n    \}', text, re.S | re.M)
    names = CPP | {rust: name for rust, name, _ in structures}
    for _, name, body in structures:
        out.append(f"struct {name} {{")
        field = r'^        (\w+): (?:(\w+)|\[(\w+); (\w+)\])(?: = "(.*?)")?,$'
        for at, plain, each, count, pointer in re.findall(field, body, re.M):
            kind = pointer or names.get(plain or each, plain or each)
            out.append(f"    {kind} {at}" + (f"[{count}];" if count else ";"))
        out.append("};")
    return "\n".join(out) + "\n"


def length(file: Path, name: str) -> int:
    """A constant of one of the crate's files by which arrays of those structures are as long."""
    found = re.search(rf"\b{name}: usize = (\d+);", file.read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


class Driver:
    """One platform's libraries, loaded into this process under their names."""

    def __init__(self, platform: str, folder: Path) -> None:
        file = folder / f"{platform}.so"
        compiler = shutil.which("c++") or "g++"
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{SONAMES[platform]}"]
        (folder / "wire.h").write_text(declarations())
        include = f"-I{folder}"
        source = str(ATTACK / "driver.cc")
        subprocess.run([compiler, *flags, include, source, "-o", str(file)], check=True)
        self.library = ctypes.CDLL(str(file))
        self.library.script_call.restype = ctypes.c_char_p
        self.library.script_left.restype = ctypes.c_char_p
        self.library.script_count.restype = ctypes.c_long
        self.library.script_call.argtypes = [ctypes.c_long]
        self.library.script_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self.library.script_args_bytes.argtypes = [ctypes.c_char_p]
        code = code_object(self.library.script_args_bytes(b"kie_decode"))
        self.library.script_code(code, ctypes.c_size_t(len(code)))
        os.environ[COMPILERS[platform]] = str(file)

    def calls(self) -> list[str]:
        """The calls since it was armed."""
        count = self.library.script_count()
        return [self.library.script_call(n).decode() for n in range(count)]

    def arm(self, at: int, code: int, *, lasting: bool = False) -> None:
        """Counts anew; call number `at` fails, -1: none does."""
        self.library.script_arm(at, code, lasting)

    def left(self) -> str:
        """What was not given back."""
        return self.library.script_left().decode()


def driver(device: str) -> Driver:
    """The driver of a device, loaded once a process. It computes nothing."""
    os.environ["KIE_SELF_TEST"] = "skip"
    platform = device.partition(":")[0]
    if platform not in DRIVERS:
        DRIVERS[platform] = Driver(platform, Path(FOLDER.name))
    return DRIVERS[platform]


def life(device: str) -> tuple[int, ...]:
    """An engine is opened, answers twice and is closed."""
    with kie.Engine(TINY, device=device, **OPTIONS) as engine:
        ids = engine.generate(PROMPT, **ANSWER).token_ids
        engine.logits(PROMPT[:3])
    return ids


def cases(random: Random) -> Iterator[Case]:
    """Which call of which device fails, once or from then on, with which code."""
    while True:
        yield {
            "device": random.choice(DEVICES),
            "at": random.random(),
            "code": random.choice(CODES),
            "lasting": random.random() < 0.25,
            "cached": random.random() < 0.3,
        }


def whole(device: str, cached: bool, folder: Path) -> list[str]:
    """The calls of a life in which nothing fails, which leaves nothing and answers as always."""
    stub = driver(device)
    os.environ["KIE_CACHE"] = str(Path(FOLDER.name) / "cache" if cached else folder / "cache")
    stub.library.script_heal()
    stub.arm(-1, 0)
    ids = life(device)
    assert ids == tuple(WANTED), f"{ids} on {device}"
    assert not stub.left(), f"left behind on {device}: {stub.left()}"
    return stub.calls()


def names(error: kie.KieError, calls: list[str], code: int) -> bool:
    """Whether an error tells which of the calls that failed it was, and how."""
    said = error.message
    if any(part in call for call in calls for part in OTHERWISE.get(code, ())) and error.hint:
        return True
    return f"{code}" in said and any(call.removesuffix("_v2") in said for call in calls)


def run(case: Case, folder: Path) -> None:
    """A whole life, one with a fault, a whole one."""
    kind = (case["device"], case["cached"])
    if kind not in COUNTS:
        COUNTS[kind] = len(whole(*kind, folder))
    fail(case, folder)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    COUNTS[kind] = len(whole(*kind, folder))


def fail(case: Case, folder: Path) -> None:
    """A life with a fault."""
    device, code, kind = case["device"], case["code"], (case["device"], case["cached"])
    stub = driver(device)
    at = case["at"] if isinstance(case["at"], int) else int(case["at"] * COUNTS[kind])
    shutil.rmtree(folder / "cache", ignore_errors=True)
    stub.library.script_heal()
    stub.arm(at, code, lasting=case["lasting"])
    error = None
    try:
        ids = life(device)
        assert ids == tuple(WANTED), f"{ids} on {device}"
    except kie.KieError as raised:
        error = raised
    made = stub.calls()
    failed = made[at] if at < len(made) else ""
    stub.arm(-1, 0)
    left = stub.left()
    what = f"{failed} ({at}) with {code} on {device}"
    if error is not None:
        assert failed, f"{error} where nothing failed"
        assert error.hint or isinstance(error, kie.EngineClosedError), f"{what}: {error!r}"
        assert names(error, made[at:] if case["lasting"] else [failed], code), f"{what}: {error!r}"
    if not case["lasting"] and not any(part in failed for part in BLIND):
        assert not left, f"left behind {what}: {left}"


def walk(device: str, folder: Path) -> int:
    """Every call that a life makes fails the first and the last time it is made; how many that is.

    Each time with the next code, so that a call in many places meets many of them. Each life gets
    further than the one before, so what a fault broke shows in the next ones; the last is whole.
    """
    calls = whole(device, cached=False, folder=folder)
    places = sorted({of for name in set(calls) for of in (calls.index(name), last(calls, name))})
    for turn, at in enumerate(places):
        code = CODES[turn % len(CODES)]
        fail({"device": device, "at": at, "code": code, "lasting": False, "cached": False}, folder)
    whole(device, cached=False, folder=folder)
    return len(places)


def last(calls: list[str], name: str) -> int:
    """Where a call is made last."""
    return len(calls) - 1 - calls[::-1].index(name)


COUNTS: dict[tuple[str, bool], int] = {}
DRIVERS: dict[str, Driver] = {}
FOLDER = tempfile.TemporaryDirectory(prefix="kie-drivers-")
WANTED = [5 + (len(PROMPT) - 1 + n) % 40 for n in range(ANSWER["max_tokens"])]
