"""All-reduce among GPUs: kie beside NCCL, and whether a long run holds.

    python3 benches/gpu/collectives.py [--devices cuda:0,cuda:1] [--out FILE]

Three parts, one JSON object at the end:

* a table of 16 bytes to 64 MB, float16: microseconds of one all-reduce in a dependent chain, of
  kie inside one kernel and of NCCL (through torch.distributed, a process a GPU, the chain in a CUDA
  graph, NCCL_NVLS_ENABLE=0);
* `--chain` dependent all-reduces of 8 KB in groups of ten, each group timed by the GPU's clock:
  no group may take so long that one of its ten could have taken ten times the median;
* `--checked` all-reduces of 8 KB of fresh numbers, every result compared bit by bit.

Without torch the NCCL column stays empty, and says why. Exit code 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

SIZES = [16, 256, 1024, 4096, 8192, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
GROUP = 10


def chain_of(size: int) -> int:
    """All-reduces of a chain: enough for the clock, few enough for the time."""
    return 1000 if size <= 65536 else 200 if size <= 1 << 20 else 20


def nccl_rank(rank: int, ranks: int, sizes: list[int], results: Any) -> None:
    """One process of NCCL's column."""
    import torch
    from torch import distributed

    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    for size in sizes:
        numbers = torch.ones(size // 2, dtype=torch.float16, device="cuda")
        chain = min(chain_of(size), 200)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                distributed.all_reduce(numbers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(chain):
                distributed.all_reduce(numbers)
        times = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / chain)
        slowest = torch.tensor(statistics.median(times[1:]), device="cuda")
        distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
        if rank == 0:
            results.put((size, slowest.item()))
        del graph
    distributed.destroy_process_group()


def nccl(ranks: int, sizes: list[int]) -> tuple[dict[int, float], str]:
    """Microseconds by size, and what is to be said of them."""
    try:
        import torch
        from torch import multiprocessing
    except ImportError:
        return {}, "torch is missing"
    if torch.cuda.device_count() < ranks:
        return {}, f"torch sees {torch.cuda.device_count()} GPUs"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "NCCL_NVLS_ENABLE": "0"}
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(nccl_rank, (ranks, sizes, results), nprocs=ranks)
    found: dict[int, float] = {}
    while not results.empty():
        size, us = results.get()
        found[size] = us
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return found, f"NCCL {version}, torch {torch.__version__}, NCCL_NVLS_ENABLE=0"


def chain(ranks: Any, count: int) -> dict[str, float]:
    """Groups of dependent all-reduces: their times, and the longest that can hide in one."""
    groups = [
        max(ranks.measure("all-reduce", 8192, steps=GROUP)) for _ in range(max(count // GROUP, 1))
    ]
    median, longest = statistics.median(groups), max(groups)
    hidden = GROUP * longest - (GROUP - 1) * min(groups)
    return {
        "count": GROUP * len(groups),
        "median_us": median,
        "longest_group_us": longest,
        "longest_us_at_most": hidden,
        "stalled_groups": sum(
            GROUP * group - (GROUP - 1) * min(groups) > 10 * median for group in groups
        ),
    }


def checked(ranks: Any, count: int) -> dict[str, float]:
    """All-reduces of fresh numbers against the definition: float32, in the order of the ranks."""
    import numpy as np

    random = np.random.default_rng(1)
    many = [random.standard_normal((64, 4096)).astype(np.float16) for _ in range(ranks.ranks)]
    wanted = many[0].astype(np.float32)
    for other in many[1:]:
        wanted += other.astype(np.float32)
    wanted = wanted.astype(np.float16).view(np.uint16)
    mismatches, start = 0, time.perf_counter()
    for turn in range(count):
        at = turn % 64
        for got in ranks.all_reduce([numbers[at] for numbers in many]):
            mismatches += not np.array_equal(got.view(np.uint16), wanted[at])
    return {"count": count, "mismatches": mismatches, "seconds": time.perf_counter() - start}


def main() -> int:
    """Measures, prints, and says whether all held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--ranks", type=int, help="virtual ranks of one device")
    parser.add_argument("--most", type=int, default=SIZES[-1], metavar="BYTES")
    parser.add_argument("--chain", type=int, default=100_000, metavar="N")
    parser.add_argument("--checked", type=int, default=100_000, metavar="N")
    parser.add_argument("--threads", type=int, default=1024)
    parser.add_argument("--out", metavar="FILE")
    given = parser.parse_args()
    from kie.kccl import Communicator

    sizes = [size for size in SIZES if size <= given.most]
    devices = given.devices.split(",") if given.ranks is None else given.devices
    ranks = Communicator(
        devices, ranks=given.ranks, message_bytes=max(given.most, 1 << 16), threads=given.threads
    )
    ours: dict[int, float] = {}
    for size in sizes:
        ours[size] = max(ranks.measure("all-reduce", size, steps=chain_of(size)))
    found: dict[str, Any] = {"devices": given.devices, "chain": chain(ranks, given.chain)}
    found["checked"] = checked(ranks, given.checked)
    print({key: found[key] for key in ("chain", "checked")}, flush=True)
    theirs, note = nccl(ranks.ranks, sizes) if "cuda" in given.devices else ({}, "no GPUs")
    print(f"all-reduce, float16, {ranks.ranks} ranks on {given.devices}; {note}")
    print(f"{'bytes':>10}{'kie us':>10}{'NCCL us':>10}{'ratio':>8}{'kie GB/s':>10}  way")
    for size in sizes:
        other = (
            f"{theirs[size]:>10.2f}{theirs[size] / ours[size]:>8.2f}"
            if size in theirs
            else (f"{'-':>10}{'-':>8}")
        )
        way = ranks.plan("all-reduce", size)
        print(f"{size:>10}{ours[size]:>10.2f}{other}{size / ours[size] / 1e3:>10.1f}  {way}")
    found |= {"kie_us": ours, "nccl_us": theirs, "note": note}
    if given.out:
        with open(given.out, "w") as file:
            json.dump(found, file)
    holds = not found["chain"]["stalled_groups"] and not found["checked"]["mismatches"]
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
