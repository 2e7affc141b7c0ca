"""What an engine on a GPU must bear, one verdict line each; a command ends within eight minutes.

    python3 benches/gpu/trust.py [--device cuda:0] ITEM...

    steady      100 x 1,000 greedy tokens: one hash, no gap ten times the median
    neighbours  two engines on one GPU; one beside PyTorch
    full        engines that open while another process has nearly all the memory, or takes it
    killed      a process killed in the middle of a launch, or of loading: the next opens at once
    memcheck, synccheck, racecheck
                compute-sanitizer over every fixture (--fixtures a,b), --jobs at a time

Needs an importable `kie` and a GPU; exits 1 if a line is BAD, or not reached within --seconds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checks
import kie
import speed

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
SANITIZERS = ("memcheck", "synccheck", "racecheck")
ITEMS = ("steady", "neighbours", "full", "killed", *SANITIZERS)
STEADY = ("laneformer-2b-lane", "llama-3.2-1b", "laneformer-2b")
OPENS_WITHIN_S = 10.0
"""An engine of a fixture whose kernels are compiled already, behind a process that was killed."""

HOARD = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def check(code, call):
    if code: sys.exit(f"{call}: {code}")
check(cuda.cuInit(0), "cuInit")
context, at = ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), int(sys.argv[1])), "retain")
check(cuda.cuCtxSetCurrent(context), "current")
leave, step, rest = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
while True:
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "info")
    take = min(step, free.value - leave)
    if take < 1 << 21 or cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(take)): break
    time.sleep(rest)
print(free.value, flush=True)
sys.stdin.read()
"""
WORKS = """
import json, os, sys, time
import kie
folder, device, prompt, moment = json.loads(sys.argv[1])
def told(stage, done, total):
    if moment == "load": print("load", flush=True)
with kie.Engine(folder, device=device, prefix_cache=False, progress=told) as engine:
    while True:
        with engine.stream(prompt, temperature=0, max_tokens=400, ignore_eos=True) as stream:
            for token in stream:
                print("token", flush=True)
"""


def index(device: str) -> str:
    """The number of the first GPU of a name."""
    return device.partition(":")[2].split(",")[0] or "0"


def hoarder(device: str, leave: int, step: int = 1 << 40, rest: float = 0) -> subprocess.Popen[str]:
    """A process that takes all memory but `leave` bytes, `step` at a time, and keeps it."""
    words = [index(device), str(leave), str(step), str(rest)]
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOARD, *words]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def answers(folder: Path, device: str, **options: Any) -> str:
    """Opens an engine and asks it for what is recorded: nothing, or what is wrong."""
    prompt, wanted = checks.recorded(folder)
    with kie.Engine(folder, device=device, **options) as engine:
        done = engine.generate(prompt, temperature=0, max_tokens=len(wanted), ignore_eos=True)
    return "" if list(done.token_ids) == wanted else "other tokens"


def tried(folder: Path, device: str, **options: Any) -> tuple[bool, str]:
    """Whether an engine answered, or said in a typed error with a way out why it did not."""
    begin = time.monotonic()
    try:
        said = answers(folder, device, **options)
        good, how = not said, said or "answered"
    except kie.KieError as error:
        good, how = bool(error.message and error.hint), f"{type(error).__name__}: {error.message}"
    return good, f"{how.splitlines()[0][:150]} ({time.monotonic() - begin:.1f} s)"


def full(device: str) -> Iterator[dict[str, Any]]:
    """Memory that another process has, or takes while an engine opens."""
    folder = DATA / "llama"
    for megabytes in (64, 600, 1200):
        with hoarder(device, megabytes << 20) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            free = int(other.stdout.readline() or -1)
            good, how = tried(folder, device)
            other.stdin.close()
        again, after = tried(folder, device)
        opened = again and after.startswith("answered")
        yield {"check": "full", "left_bytes": free, "good": good and opened, "with": how,
               "without": after}  # fmt: skip
    with speed.shaped("llama-3.2-1b") as large:
        ends = []
        for _ in range(4):
            with hoarder(device, 64 << 20, 1 << 30, 0.01) as other:
                assert other.stdin is not None
                time.sleep(random.random())
                try:
                    with kie.Engine(large, device=device, max_seq_len=512) as engine:
                        engine.generate([5, 6, 7], max_tokens=8, ignore_eos=True)
                    ends.append("answered")
                except kie.KieError as error:
                    ends.append(type(error).__name__ if error.hint else f"BAD {error!r}")
                other.stdin.close()
        good, after = tried(folder, device)
        good &= after.startswith("answered") and not any(end.startswith("BAD") for end in ends)
        yield {"check": "filled meanwhile", "good": good, "ends": ends, "without": after}


def killed(device: str, rounds: int = 6) -> Iterator[dict[str, Any]]:
    """A process ends by SIGKILL while its kernel runs, or while it loads; another opens at once."""
    folder = DATA / "laneformer_d2"
    prompt, _ = checks.recorded(folder)
    tried(folder, device)  # kernels are compiled
    for moment in ("token", "load"):
        took, wrong = [], []
        for _ in range(rounds):
            given = json.dumps([str(folder), device, prompt, moment])
            command = [sys.executable, "-c", WORKS, given]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                while child.stdout.readline().strip() != moment:
                    if child.poll() is not None:
                        raise RuntimeError("the child ended by itself")
                time.sleep(random.random() * 0.05)
                child.kill()
            begin = time.monotonic()
            good, how = tried(folder, device)
            took.append(time.monotonic() - begin)
            if not good or not how.startswith("answered"):
                wrong.append(how)
        yield {
            "check": f"killed, {moment}",
            "good": not wrong and max(took) <= OPENS_WITHIN_S,
            "rounds": rounds,
            "opened_s": [round(t, 2) for t in took],
            "wrong": wrong,
        }


def sanitized(
    tool: str, device: str, fixtures: list[Path], jobs: int, until: float
) -> Iterator[dict[str, Any]]:
    """compute-sanitizer over fixtures, some at a time, as they end."""

    def one(folder: Path) -> dict[str, Any]:
        left = until - time.monotonic()
        if left < 20:
            row = {"check": f"sanitizer {tool}", "fixture": folder.name}
            return row | {"good": False, "said": "not reached: name it in --fixtures"}
        return checks.sanitize(folder, device, tool, timeout_s=left)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(one, f) for f in fixtures]):
            yield done.result()


def rows(item: str, given: argparse.Namespace, until: float) -> Iterator[dict[str, Any]]:
    """The lines of an item."""
    device = given.device
    if item == "steady":
        for shape in STEADY:
            with speed.shaped(shape) as folder:
                yield checks.steady(shape, folder, device, runs=100, tokens=1000)
    elif item == "neighbours":
        yield checks.two_engines((DATA / "llama", DATA / "laneformer_d2"), device)
        yield checks.beside_torch(DATA / "llama", device)
    elif item == "full":
        yield from full(device)
    elif item == "killed":
        yield from killed(device)
    else:
        named = sorted(path.parent for path in DATA.glob("*/golden.safetensors"))
        if given.fixtures != "all":
            named = [DATA / name for name in given.fixtures.split(",")]
        yield from sanitized(item, device, named, given.jobs, until)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("items", nargs="+", choices=ITEMS, metavar="ITEM")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--fixtures", default="all", help="of sanitizers: all, or names")
    parser.add_argument(
        "--jobs", type=int, default=3, help="sanitizers at a time (racecheck takes much memory)"
    )
    parser.add_argument("--seconds", type=float, default=450.0, help="for all items together")
    parser.add_argument("--out", type=Path, help="write all rows as JSON")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    found = []
    for item in given.items:
        if time.monotonic() > until:
            found.append({"check": item, "good": False, "said": "not reached"})
            print(checks.show(found[-1]), flush=True)
            continue
        for row in rows(item, given, until):
            found.append(row)
            print(checks.show(row), flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    bad = [row for row in found if not row.get("good", True)]
    print(f"{len(found)} lines, {len(bad)} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
