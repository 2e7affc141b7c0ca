"""How fast one sequence could be: the ceiling of the memory's bandwidth, and an estimate of what
waiting for each other leaves of it.

Three times are estimated for a token. *Stream*: each GPU's bytes over its bandwidth. *Chain*: every
exchange (0.62 us and 28 ns a KB on an H200, more where it crosses GPUs), what follows it, and
products at the rate at which a device makes them of stored bytes. *Chosen* experts cannot be asked
for before the router is done, so their latency, and what their stream takes longer than their
products, lengthen the chain. The estimate is a smooth maximum of stream and chain; its power is
fitted to a simulation of the pipeline, from which it is within 5 %; of what was measured of dense
models on one to four H200 and on one H100 it is within 10 %. Constants of an H200 are measured,
others say what they are. Of an MI300X, which kie has never run on, each constant is listed with its
source, and instructions are those that an emulator counted in the machine code (gfx942.json).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kie.bench.counts import WORD_BYTES, Counts, count
from kie.bench.published import CONFIGS, PROJECTED
from kie.errors import InvalidRequestError, LoadError
from kie.files import read_object

if TYPE_CHECKING:
    from kie.machine import Gpu

SMOOTH = 6
"""Power of the smooth maximum."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of device, and how many. Bandwidths in GB/s, times in microseconds."""

    name: str
    count: int
    sheet: float
    """Of the data sheet."""
    stream: float
    """A long stream as measured by `kie doctor` or stated in `source`."""
    memory: float
    """Bytes of one device; 0 unknown."""
    source: str
    """Where the figures come from."""
    sustained: tuple[float, float] = (0.95, 0.88)
    """Share of `stream` that a decode keeps: one device, several."""
    exchange_us: float = 0.62
    exchange_us_kb: float = 0.028
    latency_us: float = 0.75
    """From asking for chosen weights to their first bytes."""
    cross_us: Mapping[int, float] | None = None
    """What crossing adds, by number of devices."""
    product: Mapping[str, float] | None = None
    """MB a microsecond of stored bytes that become products; None: never the limit."""
    edge_us: float = 0.0
    """What a token's end adds to the exchanges."""
    padding: tuple[float, float] = (1.0, 1.0)
    """Bytes that are streamed for one of the model: on one device, on several."""
    constants: tuple[Constant, ...] = ()
    """What the above follows from, on a device that kie has never run on."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One figure of a device that was never at hand."""

    name: str
    value: float
    unit: str
    source: str


_ASSUMED = "assumed"
_GFX942 = {
    "units": Constant("compute units", 304, "", "chipsandcheese.com: 8 dies of 38"),
    "clock": Constant("clock", 2100, "MHz", "rocminfo in ROCm/aiter#3139"),
    "sheet": Constant("memory, data sheet", 5300, "GB/s", "AMD"),
    "memory": Constant(
        "memory, achieved", 4200, "GB/s", "4.0 to 4.3 TB/s as others report; no first-hand figure"
    ),
    "latency": Constant(
        "memory latency under load", 0.65, "us",
        "218 ns to the last cache (chipsandcheese.com), 0.5 us until a stream runs again (Kog)",
    ),
    "flying": Constant(
        "weights on their way, a unit", 60 * 256, "bytes", "kLoadsMost of kernels/hip/platform.h"
    ),
    "issue": Constant("clocks an instruction of one wave", 5, "", _ASSUMED + ": four, and a gap"),
    "exchange": Constant(
        "exchange between blocks", 0.85, "us", "0.80 to 0.93 us for 256 units of an MI355X (Kog)"
    ),
    "crossing": Constant(
        "crossing GPUs", 2.0, "us", _ASSUMED + "; all-reduces of 3 (Kog) to 6.3 us (vLLM) are told"
    ),
    "edge": Constant(
        "a token's end", 1.5, "us", _ASSUMED + ": a write-back of the die's cache; not known"
    ),
    "padding": Constant(
        "bytes streamed on several GPUs", 1.16, "times",
        "partition of laneformer-2b on 8: 644 MB for 555",
    ),
}  # fmt: skip


def _counted() -> dict[str, list[float]]:
    """Of a KB of stored weights: clocks of a vector unit and of shared memory; "copy":
    instructions of the copying wave, and clocks of shared memory."""
    return json.loads(Path(__file__).with_name("gfx942.json").read_text())


def _mi300x() -> Machine:
    """From the constants: the slowest of memory, of what is on its way, and of the wave that copies
    is the stream; the busier one of vector units and shared memory makes the products."""
    of = {name: one.value for name, one in _GFX942.items()}
    counted = _counted()
    instructions, filled = counted.pop("copy")
    clocks = of["units"] * of["clock"] * 1024 / 1e6  # MB a microsecond, a clock for each KB
    flying = of["units"] * of["flying"] / of["latency"] / 1e3
    issued = clocks / (instructions * of["issue"]) * 1e3
    rates = {
        format: clocks / max(vector / 4, local + filled)
        for format, (vector, local) in counted.items()
    }
    told = tuple(_GFX942.values()) + tuple(
        Constant(f"clocks of a KB of {name}", max(vector / 4, local + filled), "",
                 "instructions counted by kie's emulator of gfx942")
        for name, (vector, local) in counted.items()
    ) + (
        Constant("instructions that copy a KB", instructions, "", "counted by the same"),
        Constant("stream that is on its way", flying, "GB/s", "bytes on their way over latency"),
        Constant("stream that one wave copies", issued, "GB/s", "clocks over instructions"),
    )  # fmt: skip
    return replace(
        _H200, name="MI300X", sheet=of["sheet"], stream=min(of["memory"], flying, issued),
        memory=206.1e9, exchange_us=of["exchange"], edge_us=of["edge"], product=rates,
        cross_us={1: 0.0} | dict.fromkeys((2, 4, 8), of["crossing"]),
        padding=(1.0, of["padding"]), constants=told,
        source="published figures and counted instructions; kie has never run on one",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU of NVIDIA's, as its data sheet says."""

    name: str
    capability: str
    multiprocessors: int
    clock: int
    """MHz, boost."""
    gigabytes: int
    bandwidth: int
    """GB/s."""
    shared: int
    """KB of shared memory that a block may have."""
    uncut: tuple[str, ...] = ()
    """Models whose rows a block of so few has no room for, by a test of partitions."""


CARDS = (
    Card("A100", "8.0", 108, 1410, 80, 2039, 163),
    Card("A10", "8.6", 72, 1695, 24, 600, 99, ("llama-3.1-8b",)),
    Card("RTX 3090", "8.6", 82, 1695, 24, 936, 99),
    Card("L4", "8.9", 58, 2040, 24, 300, 99, ("llama-3.1-8b",)),
    Card("L40S", "8.9", 142, 2520, 48, 864, 99),
    Card("RTX 4090", "8.9", 128, 2520, 24, 1008, 99),
    Card("B200", "10.0", 148, 1965, 180, 7700, 227),
    Card("RTX 5090", "12.0", 170, 2407, 32, 1792, 99),
    Card("RTX PRO 6000", "12.0", 188, 2617, 96, 1792, 99),
)
"""GPUs that the kernels are compiled for. kie has run on none of them."""


def _card(card: Card) -> Machine:
    """An H200's constants, but for what the data sheet says."""
    kept = _H200.stream / _H200.sheet
    stream, path = card.bandwidth * kept, ()
    if card.capability.startswith("8."):
        older = Constant(
            "copies without bulk, a multiprocessor", 16.0, "GB/s",
            "95 % of it: laneformer-2b in 2,223 us by the path of 8.x on an H200",
        )  # fmt: skip
        stream, path = min(stream, older.value * card.multiprocessors), (older,)
    work = card.multiprocessors * card.clock / (132 * 1980)
    rates = {format: rate * work for format, rate in (_H200.product or {}).items()}
    cross = _CROSS if card.name in ("B200", "A100") else dict.fromkeys(_CROSS, 4.5)
    told = (
        Constant("memory, data sheet", card.bandwidth, "GB/s", "NVIDIA"),
        Constant("of it a stream keeps", kept, "", "as on an H200"),
        *path,
        Constant("multiprocessors x clock, of an H200's", work, "", "NVIDIA"),
        Constant("exchange between blocks", _H200.exchange_us, "us", "as on an H200"),
    )
    return replace(
        _H200, name=card.name, sheet=card.bandwidth, stream=stream, product=rates,
        memory=card.gigabytes * 1e9, cross_us={**cross, 1: 0.0}, constants=told,
        source=f"data sheet of compute capability {card.capability}; kie has never run on one",
    )  # fmt: skip


_CROSS = {1: 0.0, 2: 1.1, 4: 1.3, 8: 1.6}
_H200 = Machine(
    "H200", 1, 4800, 4550, 150.7e9, "measured on 1 to 4 H200; 8 by their simulation",
    cross_us=_CROSS, product={"bf16": 13.0, "fp8": 10.0, "4bit": 8.0},
)  # fmt: skip
_H100 = replace(
    _H200, name="H100", sheet=3350, stream=3164, memory=85.0e9,
    source="one measured (80 GB, HBM3); several as H200",
)  # fmt: skip
GPUS = {
    "H200": _H200,
    "H100": _H100,
    "MI300X": _mi300x(),
    **{card.name: _card(card) for card in CARDS},
}
LINK_US = {"nvlink": None, "xgmi": 2.0, "pcie": 4.5, "socket": 4.5}
"""What crossing adds over a link of this kind; None: as the GPU's table has it."""


def machine(device: str, topology: str | Path | None = None) -> Machine:
    """`8xH200`, `MI300X`, `cpu` (measured here), or the GPUs of a topology file (`device` "auto").

    Raises InvalidRequestError for what it does not know.
    """
    if topology is not None:
        return _recorded(Path(topology), device)
    if device in ("cpu", "auto"):
        return _cpu()
    found = re.fullmatch(r"(?:(\d+)x)?(.+)", device)
    name = next((one for one in GPUS if found and one.lower() == found[2].lower()), None)
    if found is None or name is None:
        raise InvalidRequestError(
            f"--device {device}: wanted NxNAME or cpu, got no known name",
            hint=f"names are {', '.join(GPUS)}; or pass --topology FILE",
            context={"param": "device"},
        )
    number = int(found[1] or 1)
    if number not in _CROSS:
        raise InvalidRequestError(
            f"--device {device}: wanted 1, 2, 4 or 8 of them, got {number}",
            context={"param": "device"},
        )
    return replace(GPUS[name], count=number)


def here(gpu: Gpu) -> Machine:
    """A GPU at hand, at the rate at which its memory was measured. Everything else is as its card's
    name says; of one that no table has, an H200's by multiprocessors."""
    assert gpu.read_bandwidth is not None, "asked for of measured ones alone"
    known = sorted(GPUS, key=len, reverse=True)  # an A100 is no A10
    name = next((name for name in known if name in gpu.model), None)
    card = GPUS[name] if name else _H200
    if name is None:
        work = gpu.multiprocessors / 132
        rates = {format: rate * work for format, rate in (_H200.product or {}).items()}
        card = replace(card, product=rates, sheet=0)
    return replace(
        card, name=gpu.name, stream=gpu.read_bandwidth / 1e9, memory=float(gpu.memory_bytes),
        source=f"read bandwidth measured now, else {name or 'an H200'}",
    )  # fmt: skip


def _cpu() -> Machine:
    from kie import _kie

    name, isa, total = _kie.host()[:3]
    stream = _kie.read_bandwidth(gigabytes=1.0) / 1e9
    return Machine(
        f"cpu ({name}, {isa})", 1, 0, stream, total, "read bandwidth measured now",
        sustained=(0.95, 0.95), exchange_us=1.0, exchange_us_kb=0.0, latency_us=0.1,
    )  # fmt: skip


def _recorded(path: Path, device: str) -> Machine:
    """The GPUs of a file that `kie doctor --topology` wrote."""
    try:
        recorded = read_object(path)
        models = {gpu["model"].split(maxsplit=1)[-1] for gpu in recorded["gpus"]}
        if "PRO 6000" in models:
            models = {"RTX PRO 6000"}
        kinds = {link["via"]["kind"] for link in recorded["links"]}
        number = len(recorded["gpus"])
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise InvalidRequestError(
            f"{path}: wanted a topology as kie doctor --topology writes it, got "
            f"{type(cause).__name__}: {cause}",
            context={"param": "topology"},
        ) from cause
    if len(models) != 1 or not models <= set(GPUS):
        raise InvalidRequestError(
            f"{path}: wanted GPUs of one known model, got {', '.join(sorted(models))}",
            hint=f"known are {', '.join(GPUS)}",
            context={"param": "topology"},
        )
    if device != "auto":
        number = machine(device).count
    found = replace(GPUS[models.pop()], count=number)
    added = max((LINK_US.get(kind) or 0.0 for kind in kinds), default=0.0)
    return replace(found, cross_us={1: 0.0, number: added}) if added else found


def config_of(spec: str | None) -> tuple[str, Mapping[str, Any]]:
    """Name and config.json of a known name, a folder, a file, or the default model.

    Raises LoadError where there is none.
    """
    known = spec.lower() if spec else ""
    if known in CONFIGS:
        return known, CONFIGS[known]
    path = Path(spec) if spec else Path(__file__).parent.parent / "demo"
    file = path / "config.json" if path.is_dir() else path
    try:
        found = read_object(file)
    except (OSError, ValueError) as cause:
        raise LoadError(
            f"{file}: wanted a model's config.json, got {type(cause).__name__}: {cause}",
            hint=f"or name one of {', '.join(CONFIGS)}",
            context={"param": "spec"},
        ) from cause
    return (spec or "default model"), found


@dataclass(frozen=True, slots=True)
class Roofline:
    """What `kie bench roofline` prints. Times in microseconds a token."""

    model: str
    device: str
    source: str
    context: int
    parts: tuple[tuple[str, float], ...]
    """Name and bytes."""
    bytes_per_token: float
    stored_bytes: float
    fits: bool
    bandwidth_gb_s: float
    """All devices, as measured."""
    exchanges: int
    cross: int
    ceiling_us: float
    stream_us: float
    exchange_us: float
    cross_us: float
    after_us: float
    """What follows exchanges: ends of products, softmax, choices."""
    product_us: float
    chosen_us: float
    """What chosen weights come too late for."""
    chain_us: float
    edge_us: float
    estimate_us: float
    constants: tuple[Constant, ...]
    """Of a device that was never at hand: what the estimate follows from."""
    limit: str
    """What to make better first."""
    projected: tuple[float, str] | None
    """Tokens a second that others print, and whose."""

    def to_dict(self) -> dict[str, Any]:
        """All fields, and the rates."""
        rates = {"ceiling_tok_s": 1e6 / self.ceiling_us, "estimate_tok_s": 1e6 / self.estimate_us}
        return asdict(self) | rates


def roofline(spec: str | None, on: Machine, context: int = 4096) -> Roofline:
    """Ceiling and estimate of one sequence at `context` positions.

    Raises LoadError, UnsupportedModelError, InvalidRequestError.
    """
    if context < 1:
        raise InvalidRequestError(
            f"context must be at least 1, got {context}", context={"param": "context"}
        )
    name, config = config_of(spec)
    counts = count(config, context)
    several = on.count > 1
    rate = on.stream * on.sustained[several] / 1e3  # MB a microsecond, one device
    padded = on.padding[several] / 1e6
    held = [(part, part.bytes / min(on.count, part.ranks) * padded) for part in counts.parts]
    stream = sum(size for _, size in held) / rate
    product, late = 0.0, 0.0
    for part, size in held:
        made = size / on.product[part.format] if on.product else 0.0
        product += made
        if part.chosen:
            late += max(0.0, size / rate - made)
    exchange, after, cross = _waits(counts, on)
    late += sum(one.times * on.latency_us for one in counts.exchanges if one.chosen)
    chain = exchange + cross + after + product + late + on.edge_us
    estimate = (stream**SMOOTH + chain**SMOOTH) ** (1 / SMOOTH)
    waits = {"exchanges": exchange, "crossing GPUs": cross, "ends of products": after}
    waits |= {"products": product, "chosen weights": late, "a token's end": on.edge_us}
    largest = max(waits, key=lambda name: waits[name])
    limit = "memory bandwidth" if stream >= chain else f"the chain; most of it {largest}"
    label = f"{on.count}x{on.name}" if on.sheet else on.name
    return Roofline(
        model=name,
        device=label,
        source=on.source,
        context=context,
        parts=tuple((part.name, part.bytes) for part in counts.parts),
        bytes_per_token=counts.bytes,
        stored_bytes=counts.stored,
        fits=not on.memory or counts.stored / on.count < on.memory * 0.98,
        bandwidth_gb_s=on.stream * on.count,
        exchanges=sum(one.times for one in counts.exchanges),
        cross=sum(one.times for one in counts.exchanges if one.cross) if several else 0,
        ceiling_us=counts.bytes / 1e3 / (on.stream * on.count),
        stream_us=stream,
        exchange_us=exchange,
        cross_us=cross,
        after_us=after,
        product_us=product,
        chosen_us=late,
        chain_us=chain,
        edge_us=on.edge_us,
        constants=on.constants,
        estimate_us=estimate,
        limit=limit,
        projected=PROJECTED.get((name, label)),
    )


def _waits(counts: Counts, on: Machine) -> tuple[float, float, float]:
    """Microseconds a token: exchanges, what follows them, crossing."""
    exchange = after = crossing = 0.0
    added = (on.cross_us or {}).get(on.count, 0.0)
    for one in counts.exchanges:
        kb = one.words * WORD_BYTES / 1024 / (on.count if one.split else 1)
        exchange += one.times * (on.exchange_us + on.exchange_us_kb * kb)
        after += one.times * one.us if on.product else 0.0
        crossing += one.times * added if one.cross else 0.0
    return exchange, after, crossing


def table(found: Roofline) -> str:
    """For a terminal."""
    lines = [
        f"{found.model} on {found.device}, one sequence at {found.context:,} positions",
        f"  ({found.source})",
        "",
        "a token reads",
    ]
    lines += [f"  {name:34}{size / 1e6:12,.1f} MB" for name, size in found.parts]
    fits = "" if found.fits else "; does not fit"
    lines += [
        f"  {'in all':34}{found.bytes_per_token / 1e6:12,.1f} MB"
        f"   (stored {found.stored_bytes / 1e9:,.1f} GB{fits})",
        "",
        f"ceiling: {found.bandwidth_gb_s:,.0f} GB/s, nothing waited for   "
        f"{_both(found.ceiling_us)}",
        "",
        *([f"ESTIMATE: kie has never run on {found.device}"] if found.constants else []),
        "estimate, us a token",
        _term("stream of the weights", found.stream_us),
        _term("chain of what waits for each other", found.chain_us),
        _term(f"  {found.exchanges} exchanges", found.exchange_us),
        _term(f"  {found.cross} of them cross GPUs", found.cross_us),
        _term("  ends of products, softmax, choices", found.after_us),
        _term("  products", found.product_us),
        _term("  chosen weights come late", found.chosen_us),
        *([_term("  a token's end", found.edge_us)] if found.edge_us else []),
        f"  {'both overlap':42}{_both(found.estimate_us)}",
        f"limit: {found.limit}",
    ]
    if found.projected:
        rate, whose = found.projected
        lines.append(f"beside it: {rate:,.0f} tok/s ({whose})")
    if found.constants:
        lines += ["", "what the estimate follows from"]
        lines += [f"  {one.name:36}{one.value:12,.2f} {one.unit:6}{one.source}"
                  for one in found.constants]  # fmt: skip
    return "\n".join(lines)


def markdown(found: Sequence[Roofline]) -> str:
    """A row a model, for pasting."""
    lines = [
        "| model | device | MB a token | ceiling tok/s | estimate tok/s | limit | others print |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    for one in found:
        beside = f"{one.projected[0]:,.0f} ({one.projected[1]})" if one.projected else ""
        rates = f"{1e6 / one.ceiling_us:,.0f} | {1e6 / one.estimate_us:,.0f}"
        lines.append(
            f"| {one.model} | {one.device} | {one.bytes_per_token / 1e6:,.0f} | {rates} "
            f"| {one.limit if one.fits else 'does not fit'} | {beside} |"
        )
    never = sorted({one.device for one in found if one.constants})
    if never:
        lines += ["", f"ESTIMATE: kie has never run on {', '.join(never)}."]
    return "\n".join(lines)


CARD_MODELS = ("llama-3.2-1b", "laneformer-2b", "llama-3.1-8b", "llama-3.1-8b-fp8")
"""Models of the table of cards."""


def cards(context: int = 4096) -> str:
    """The table of cards: what one sequence of some models is estimated at, in tokens a second."""
    lines = [
        f"| GPU | compute capability | GB | GB/s | KB a block | {' | '.join(CARD_MODELS)} |",
        "|---|---|--:|--:|--:|" + "--:|" * len(CARD_MODELS),
    ]
    for card in CARDS:
        found = [roofline(model, machine(card.name), context) for model in CARD_MODELS]
        rates = [f"{1e6 / one.estimate_us:,.0f}" if one.fits else "too large" for one in found]
        for model in card.uncut:
            rates[CARD_MODELS.index(model)] = "no cut"
        size = f"{card.gigabytes} | {card.bandwidth:,} | {card.shared}"
        lines.append(f"| {card.name} | {card.capability} | {size} | {' | '.join(rates)} |")
    return "\n".join(lines)


def _term(name: str, us: float) -> str:
    return f"  {name:42}{us:10,.1f}"


def _both(us: float) -> str:
    return f"{us:10,.1f} us   {1e6 / us:10,.1f} tok/s"
