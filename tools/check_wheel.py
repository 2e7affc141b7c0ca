"""Check a wheel, then install it into an empty environment and stream from the default model.

    python tools/check_wheel.py dist/kie-*.whl

The wheel must be one for all Pythons from 3.10 (abi3) and for glibc 2.28 (manylinux_2_28), stay
below 60 MB, link to no GPU library and carry the default model, the type stub and the licence
files. The environment it is then installed into has no compiler on its PATH and is used from a
folder away from the sources.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

SIZE_BYTES_MAX = 60_000_000
FORBIDDEN = ("cuda", "nvrtc", "nvidia", "nvml", "nccl", "hip", "hsa", "roc", "python")
WANTED = (
    "kie/__init__.py",
    "kie/_kie.pyi",
    "kie/py.typed",
    "kie/demo/config.json",
    "kie/demo/tokenizer.json",
    "kie/demo/tokenizer_config.json",
    "kie/demo/model.safetensors.index.json",
    "kie/demo/model-00001-of-00002.safetensors",
    "kie/demo/model-00002-of-00002.safetensors",
)
TAG = "-cp310-abi3-manylinux_2_28_x86_64.whl"
GLIBC_MAX = (2, 28)
LICENCES = ("LICENSE", "NOTICE")

# Runs in the empty environment: streams greedily and compares with the recorded golden. Rounding
# may decide a step that was won by less than 0.15, so the comparison ends there.
STREAM = """
import json, pathlib, sys
import kie
home = pathlib.Path(kie.__file__).resolve()
assert home.is_relative_to(pathlib.Path(sys.prefix).resolve()), home
case = json.loads((home.parent / "demo" / "golden.json").read_text())["prompts"][0]
sure = next((i for i, m in enumerate(case["margins"]) if m < 0.15), len(case["margins"]))
assert sure > 8, sure
with kie.Engine() as engine:
    with engine.stream(case["prompt"], max_tokens=sure, temperature=0, ignore_eos=True) as stream:
        ids = [i for token in stream for i in token.token_ids]
assert ids == case["greedy_ids"][:sure], (ids, case["greedy_ids"][:sure])
print(f"streamed {sure} tokens, equal to the golden")
"""


def needed(elf: bytes) -> list[str]:
    """The DT_NEEDED entries of a 64-bit little-endian ELF shared object."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", elf, 0x20)
    size, count = struct.unpack_from("<HH", elf, 0x36)
    segments = [struct.unpack_from("<IIQQQQQQ", elf, offset + i * size) for i in range(count)]
    # Each: type, flags, offset in the file, virtual and physical address, sizes, alignment.
    loads = [s for s in segments if s[0] == 1]
    (dynamic,) = [s for s in segments if s[0] == 2]

    def in_file(address: int) -> int:
        for _, _, start, virtual, _, length, _, _ in loads:
            if virtual <= address < virtual + length:
                return address - virtual + start
        raise ValueError(f"address {address:#x} is in no loaded segment")

    entries = list(struct.iter_unpack("<QQ", elf[dynamic[2] : dynamic[2] + dynamic[5]]))
    strings = in_file(next(value for tag, value in entries if tag == 5))
    names: list[str] = []
    for tag, value in entries:
        if tag == 0:
            break
        if tag == 1:
            begin = strings + value
            names.append(elf[begin : elf.index(b"\0", begin)].decode())
    return names


def newest_glibc(elf: bytes) -> tuple[int, int]:
    """The newest version of the C library whose symbols a shared object asks for; (0, 0): none."""
    found = re.findall(rb"\0GLIBC_(\d+)\.(\d+)[.\d]*(?=\0)", elf)
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))


def tag_faults(name: str, glibc: tuple[int, int]) -> list[str]:
    """What is wrong with a wheel's name, given the C library that its extension needs."""
    faults = [] if name.endswith(TAG) else [f"{name}: wanted the tag {TAG[1:-4]}"]
    if glibc > GLIBC_MAX:
        faults.append("needs glibc {}.{}, wanted {}.{} at most".format(*glibc, *GLIBC_MAX))
    return faults


def look_inside(wheel: Path) -> list[str]:
    """What is wrong with the archive itself, one line a fault."""
    faults: list[str] = []
    size = wheel.stat().st_size
    if size >= SIZE_BYTES_MAX:
        faults.append(f"{size / 1e6:.1f} MB, wanted below {SIZE_BYTES_MAX / 1e6:.0f}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        faults += [f"{name} is missing" for name in WANTED if name not in names]
        for licence in LICENCES:
            if not any(".dist-info/" in n and n.endswith("/" + licence) for n in names):
                faults.append(f"{licence} is missing")
        objects = [name for name in names if name.endswith(".so")]
        if len(objects) != 1:
            faults.append(f"shared objects {objects}, wanted one")
        for name in objects:
            extension = archive.read(name)
            libraries = needed(extension)
            faults += tag_faults(wheel.name, newest_glibc(extension))
            print(f"{name} needs {', '.join(libraries)}")
            bad = [lib for lib in libraries if any(word in lib.lower() for word in FORBIDDEN)]
            faults += [f"{name} links to {lib}" for lib in bad]
    print(f"{wheel.name}: {size / 1e6:.1f} MB")
    return faults


def run_outside(wheel: Path) -> None:
    """Install into a fresh environment and stream there. A failing step raises."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "env"
        venv.create(home, with_pip=True)
        python = home / "bin" / "python"
        install = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
        subprocess.run([*install, str(wheel.resolve())], check=True, cwd=scratch)
        keep = {k: v for k, v in os.environ.items() if k in ("HOME", "LANG", "TMPDIR")}
        env = keep | {"PATH": str(home / "bin")}
        subprocess.run([str(python), "-c", STREAM], check=True, cwd=scratch, env=env)
        command = [str(home / "bin" / "kie"), "run", "def fibonacci(n):", "--max-tokens", "24"]
        done = subprocess.run(
            command, check=True, cwd=scratch, env=env, text=True, capture_output=True
        )
        if not done.stdout.strip():
            raise RuntimeError("`kie run` printed nothing")
        print(json.dumps(done.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the wheel that ships.")
    parser.add_argument("wheel", type=Path)
    args = parser.parse_args()
    faults = look_inside(args.wheel)
    for fault in faults:
        print(f"fault: {fault}")
    if faults:
        return 1
    run_outside(args.wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
