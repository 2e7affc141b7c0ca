"""Charts of a decode step's time from benches/baselines.jsonl: the latest figure of each shape at
context 128, over the floor that its bytes set. On one GPU with the target and PyTorch beside it,
and on several GPUs.

    python3 benches/gpu/chart.py [BASELINES] [FOLDER]

Writes decode.svg and scaling.svg for the manual. Light and dark by the reader's own setting.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from targets import DECODE_TARGET_US

FOLDER = Path(__file__).resolve().parents[1]
SHAPES = {
    "laneformer-2b": "Laneformer 2B",
    "laneformer-2b-plain": "2B without lanes",
    "laneformer-2b-half": "4 of its 8 lanes",
    "llama-3.2-1b": "Llama 3.2 1B",
    "llama-3.1-8b": "Llama 3.1 8B",
    "laneformer-2b-lane": "1/8 of Laneformer 2B",
}
WIDTH, LEFT, RIGHT, TOP, ROW = 720, 160, 96, 34, 38
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f }
  .soft { fill: #6e7781; font-size: 11px }
  .bar { fill: #2f6fb3 } .grid { stroke: #d0d7de } .floor { stroke: #24292f }
  .target { stroke: #b35900; stroke-width: 2 }
  .peer { fill: none; stroke: #6e7781; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .soft { fill: #9198a1 } .bar { fill: #4c8fd6 }
    .grid { stroke: #3d444d } .floor { stroke: #e6edf3 } .target { stroke: #f0a050 }
    .peer { stroke: #9198a1 }
  }
"""


def latest(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last figure of each shape, and of PyTorch where there is one."""
    found: dict[str, dict[str, Any]] = {}
    peers: dict[str, float] = {}
    for row in lines:
        shape = row.get("shape")
        if shape not in SHAPES or row.get("context") != 128:
            continue
        if (row["bench"], row.get("gpus"), row.get("batch")) != ("decode", 1, 1):
            continue
        if "peer" in row:
            peers[shape] = row["us_per_token"]
        else:
            found[shape] = row
    return [
        {
            "name": name,
            "us": found[shape]["us_per_token"],
            "floor": found[shape]["floor_us"],
            "target": DECODE_TARGET_US[shape, 1],
            "peer": peers.get(shape),
            "about": f"{found[shape]['device']}, {found[shape]['date']}",
        }
        for shape, name in SHAPES.items()
        if shape in found and (shape, 1) in DECODE_TARGET_US
    ]


def scaling(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last figure of each shape that was measured on several GPUs, of each number of them."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in lines:
        at = (row.get("shape"), row.get("context"), row.get("batch"), row["bench"])
        if at[0] in SHAPES and at[1:] == (128, 1, "decode") and "peer" not in row:
            found[row["shape"], row["gpus"]] = row
    several = {shape for shape, gpus in found if gpus > 1}
    return [
        {
            "name": f"{name} x {gpus}",
            "us": row["us_per_token"],
            "floor": row["floor_us"] / gpus,
            "about": f"{row['device']}, {row['date']}",
        }
        for shape, name in SHAPES.items()
        if shape in several
        for (of, gpus), row in sorted(found.items())
        if of == shape
    ]


def draw(rows: list[dict[str, Any]]) -> str:
    """The chart: a bar from 0 to time over floor; where there are such, a line at the target and a
    ring for PyTorch.
    """
    ratios = [value / row["floor"] for row in rows for value in (row["us"], row.get("peer") or 0)]
    targets = any("target" in row for row in rows)
    most = max(1.75, *(0.25 * (int(ratio / 0.25) + 1) for ratio in ratios))
    height = TOP + ROW * len(rows) + 34
    bottom = TOP + ROW * len(rows)

    def x(ratio: float) -> float:
        return round(LEFT + ratio / most * (WIDTH - LEFT - RIGHT), 1)

    def line(name: str, at: float, top: float, end: float) -> str:
        return f'<line class="{name}" x1="{at}" x2="{at}" y1="{top}" y2="{end}"/>'

    def text(at: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{at}" y="{y}"{more and " " + more}>{words}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' aria-label="Time of a decode step over the time that its bytes take">',
        f"<style>{STYLE}</style>",
        text(LEFT, 16, "time of a decode step, in units of its floor (bytes / stream limit)"),
    ]
    for step in range(int(most / 0.25) + 1):
        at = x(step * 0.25)
        out.append(line("floor" if step == 4 else "grid", at, TOP - 6, bottom))
        if step % 2 == 0:
            label = f"{step * 0.25:.1f}"
            out.append(text(at, bottom + 14, label, 'class="soft" text-anchor="middle"'))
    for index, row in enumerate(rows):
        y = TOP + ROW * index
        ratio = row["us"] / row["floor"]
        out += [
            text(LEFT - 10, y + 17, row["name"], 'text-anchor="end"'),
            f'<rect class="bar" x="{LEFT}" y="{y + 4}" width="{x(ratio) - LEFT:.1f}" height="18"/>',
            text(WIDTH - RIGHT + 8, y + 17, f"{row['us']:,.0f} µs"),
        ]
        if targets:
            out.append(line("target", x(row["target"] / row["floor"]), y, y + 26))
        if row.get("peer"):
            at = x(row["peer"] / row["floor"])
            out.append(f'<circle class="peer" cx="{at}" cy="{y + 13}" r="5"/>')
    y, soft = bottom + 29, 'class="soft"'
    about = sorted({row["about"] for row in rows})[-1]
    out += [
        line("floor", LEFT + 4, y - 10, y + 1),
        text(LEFT + 12, y, "floor" if targets else f"floor of so many GPUs · {about}", soft),
    ]
    if targets:
        out += [
            line("target", LEFT + 52, y - 10, y + 1),
            text(LEFT + 60, y, "target", soft),
            f'<circle class="peer" cx="{LEFT + 108}" cy="{y - 4}" r="4"/>',
            text(LEFT + 117, y, f"PyTorch, compiled and graphed · {about}", soft),
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> int:
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "baselines.jsonl"
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else FOLDER
    lines = [json.loads(line) for line in source.read_text().splitlines()]
    # Bars, floors and targets are of one kind of GPU; other kinds have rows in RESULTS.md.
    lines = [line for line in lines if "H200" in line.get("device", "H200")]
    charts = {"decode.svg": latest(lines), "scaling.svg": scaling(lines)}
    for name, rows in charts.items():
        if not rows:
            print(f"{source}: no figures for {name}", file=sys.stderr)
            return 1
        (folder / name).write_text(draw(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
