"""Builds the harness for named shapes and overrides: variants.py OUT_DIR NAME[:KEY=VALUE[:...]] ...

HARNESS=prefill.cu builds that one instead of decode.cu.

Each argument becomes one binary OUT_DIR/NAME.KEY=VALUE...; the shapes are those of the table in
NOTES.md. `nvcc` is taken from PATH or NVCC.
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
LANE = {
    "LAYERS": 15,
    "HIDDEN": 3072,
    "HEADS": 4,
    "KV_HEADS": 2,
    "HEAD_DIM": 96,
    "FFN": 1536,
    "VOCAB": 4000,
    "DELAY": 2,
    "WINDOW": 512,
    "WINDOW_LAYERS": 10,
    "BLOCKS": 128,
    "WARPS": 12,
    "COLUMNS": 1,
    "SLOT_BYTES": 24576,
    "SPLITS": 8,
    "MERGE": 0,
    "POLL": 1,
    "NO_WAITS": 0,
    "NO_STREAM": 0,
    "PAGES_MAX": 520,
    "REST_GATHER": 250,
    "REST_MERGE": 0,
    "PREFILL_CHUNK": 2048,
}
SHAPES = {
    "2b": LANE | {"LANES": 8, "PREFILL_CHUNK": 512},
    "lane": LANE | {"LANES": 1, "SLOT_BYTES": 18432},
    "1b": LANE
    | {
        "LAYERS": 16,
        "HIDDEN": 2048,
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": 64,
        "FFN": 8192,
        "VOCAB": 128256,
        "LANES": 1,
        "WINDOW": 0,
        "WINDOW_LAYERS": 0,
        "WARPS": 8,
        "MERGE": 1,
        "SLOT_BYTES": 16384,
    },
    "8b": LANE
    | {
        "LAYERS": 32,
        "HIDDEN": 4096,
        "HEADS": 32,
        "KV_HEADS": 8,
        "HEAD_DIM": 128,
        "FFN": 14336,
        "VOCAB": 128256,
        "LANES": 1,
        "WINDOW": 0,
        "WINDOW_LAYERS": 0,
        "WARPS": 8,
        "MERGE": 1,
        "SLOT_BYTES": 16384,
    },
}


def command(out: pathlib.Path, spec: str) -> list[str]:
    name, *overrides = spec.split(":")
    shape, extra = dict(SHAPES[name]), []
    for item in overrides:
        key, _, value = item.partition("=")
        if key in shape:
            shape[key] = value
        else:
            extra.append(f"-DKIE_{key}" + (f"={value}" if value else ""))
    target = out / spec.replace(":", ".")
    return [
        os.environ.get("NVCC", "nvcc"),
        "-O3",
        "-std=c++17",
        "-lineinfo",
        "-Xptxas",
        "-v",
        "-gencode=arch=compute_90a,code=sm_90a",
        f"-I{HERE.parent.parent / 'kernels'}",
        *[f"-DKIE_{k}={v}" for k, v in shape.items()],
        *extra,
        *os.environ.get("NVCC_FLAGS", "").split(),
        "-o",
        str(target),
        str(HERE / os.environ.get("HARNESS", "decode.cu")),
    ]


def build(out: pathlib.Path, spec: str) -> bool:
    done = subprocess.run(command(out, spec), capture_output=True, text=True, check=False)
    text = done.stderr.split("\n")
    for i, line in enumerate(text):
        if "'kie_decode'" in line or "'kie_prefill'" in line:
            print(spec, " | ".join(part.strip() for part in text[i + 1 : i + 4]), flush=True)
    if done.returncode:
        print(spec, "\n".join(line for line in text if "error" in line)[:3000], flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        sys.exit(0 if all(list(pool.map(lambda s: build(folder, s), sys.argv[2:]))) else 1)
