"""Bytes and times of models that are not at hand, against counts and measurements of others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import kie
import pytest
from conftest import ROOT, TINY
from kie.bench.published import CONFIGS
from kie.bench.roofline import CARDS, cards, here, machine, markdown, roofline, table
from kie.cli import main
from kie.engine import plan_ahead
from kie.machine import Gpu

# MB a token at 4,096 positions by part, GB stored: counted by hand from the tensors' sizes.
COUNTED = {
    "qwen3-coder-next": (
        4183, 80.4,
        {"delta-net projections": 1208, "attention": 327, "router": 101, "shared expert": 151,
         "chosen experts": 1510, "head": 622, "state, read and written": 151,
         "keys and values": 101},
    ),
    "gpt-oss-120b": (
        5158, 65.2,
        {"attention": 1911, "router": 27, "chosen experts": 1906, "head": 1158,
         "keys and values": 156},
    ),
    "deepseek-v4-flash": (
        11234, 156.0,
        {"attention": 4599, "compressors": 619, "indexer": 176, "hyper-connections": 135,
         "router": 90, "shared expert": 1082, "chosen experts": 3449, "head": 1059},
    ),
    "kimi-k2.6": (
        33272, 594.2,
        {"attention": 12337, "dense mlp": 793, "router": 330, "shared expert": 5285,
         "chosen experts": 11891, "head": 2349, "latents": 288},
    ),
}  # fmt: skip
# Exchanges, of them across GPUs, and microseconds a token on that many H200 by simulation.
SIMULATED = {
    "qwen3-coder-next": (302, {1: 1152, 2: 863, 4: 708, 8: 653}),
    "gpt-oss-120b": (236, {1: 1310, 2: 850, 4: 638, 8: 545}),
    "deepseek-v4-flash": (497, {2: 1740, 4: 1337, 8: 1174}),
    "kimi-k2.6": (611, {8: 1775}),
}
# Microseconds of the floor on one H200 at 128 positions, and measured on that many (RESULTS.md).
MEASURED = {
    "laneformer-2b": (977, {1: 1000, 2: 530, 4: 293}),
    "llama-3.2-1b": (543, {1: 581, 2: 341, 4: 234}),
    "llama-3.1-8b": (3299, {1: 3469, 2: 1946, 4: 1052}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_bytes_are_those_of_the_tensors(name: str, tmp_path: Path) -> None:
    """From a config.json alone, within a per cent of what was counted by hand."""
    total, stored, parts = COUNTED[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    found = roofline(str(path), machine("8xH200"))
    assert found.bytes_per_token / 1e6 == pytest.approx(total, rel=0.01)
    assert found.stored_bytes / 1e9 == pytest.approx(stored, rel=0.01)
    got = {part: size / 1e6 for part, size in found.parts}
    for part, size in parts.items():
        assert got[part] == pytest.approx(size, rel=0.02), part


@pytest.mark.parametrize("name", SIMULATED)
def test_estimates_are_near_the_simulation(name: str) -> None:
    exchanges, times = SIMULATED[name]
    for devices, us in times.items():
        found = roofline(name, machine(f"{devices}xH200"))
        assert found.exchanges == pytest.approx(exchanges, abs=1)
        assert found.estimate_us == pytest.approx(us, rel=0.05)
        assert found.ceiling_us < found.estimate_us


@pytest.mark.parametrize("name", MEASURED)
def test_estimates_are_near_what_was_measured(name: str) -> None:
    floor, times = MEASURED[name]
    assert roofline(name, machine("H200"), 128).ceiling_us == pytest.approx(floor, rel=0.01)
    for devices, us in times.items():
        found = roofline(name, machine(f"{devices}xH200"), 128)
        assert found.estimate_us == pytest.approx(us, rel=0.1)


def test_estimates_are_near_what_one_h100_took() -> None:
    """Microseconds at 128 positions (RESULTS.md)."""
    for name, us in (("laneformer-2b", 1434), ("llama-3.2-1b", 807), ("llama-3.1-8b", 5018)):
        found = roofline(name, machine("H100"), 128)
        assert found.estimate_us == pytest.approx(us, rel=0.1), name
        assert found.ceiling_us < us


def test_small_models_are_what_the_engine_reads() -> None:
    """Weights of the default model, against the engine's own plan."""
    found = roofline(None, machine("H200"), 128)
    weights = sum(size for name, size in found.parts if name != "keys and values")
    said = plan_ahead(device="cpu")["plan"].split("a token   reads ")[1].split(" MB")[0]
    assert weights / 1e6 == pytest.approx(float(said), rel=0.02)
    assert roofline(str(TINY), machine("H200"), 128).bytes_per_token > 0


def test_a_gpu_at_hand_is_its_card_at_the_rate_that_was_measured() -> None:
    gpu = Gpu("cuda:0", "NVIDIA A100-SXM4-80GB", "sm_80", 108, 80 << 30, 79 << 30, 1.5e12)
    found = here(gpu)
    assert (found.name, found.stream, found.memory) == ("cuda:0", 1500.0, float(80 << 30))
    assert found.product == machine("A100").product
    other = here(replace(gpu, model="NVIDIA Z9", multiprocessors=66))
    assert other.stream == 1500.0
    assert (other.product or {})["bf16"] == (machine("H200").product or {})["bf16"] / 2
    slower, faster = (roofline("llama-3.1-8b", here(replace(gpu, read_bandwidth=rate)), 128)
                      for rate in (1e12, 2e12))  # fmt: skip
    assert slower.ceiling_us == pytest.approx(2 * faster.ceiling_us)


def test_recorded_machines() -> None:
    folder = ROOT / "crates" / "kie-kccl" / "topologies"
    found = roofline("gpt-oss-120b", machine("auto", folder / "h200x4.json"))
    assert found == roofline("gpt-oss-120b", machine("4xH200"))
    amd = roofline("laneformer-2b", machine("auto", folder / "mi300xx8.json"), 128)
    assert amd.device == "8xMI300X"
    assert amd.projected == (3000, "Kog, measured")
    assert amd.estimate_us < 1e6 / 4500
    slow = roofline("llama-3.1-8b", machine("auto", folder / "pcie4.json"))
    assert slow.cross_us > roofline("llama-3.1-8b", machine("4xH200")).cross_us
    assert not roofline("kimi-k2.6", machine("4xH200")).fits
    assert roofline("kimi-k2.6", machine("8xH200")).fits


def test_of_what_was_never_at_hand_each_constant_is_told() -> None:
    """By hand: 2.25 MB a block on 304 blocks, less its padding, at 4.2 TB/s keeps 95 %."""
    one = roofline("laneformer-2b", machine("MI300X"), 128)
    assert one.stream_us == pytest.approx(4455e6 / 4.2e6 / 0.95, rel=0.01)
    assert one.estimate_us == pytest.approx(1100, rel=0.05)
    assert one.limit == "memory bandwidth"
    found = {constant.name: constant for constant in one.constants}
    assert found["stream that one wave copies"].value > found["memory, achieved"].value
    assert found["stream that is on its way"].value > found["memory, achieved"].value
    assert all(constant.source for constant in one.constants)
    text = table(one)
    assert "ESTIMATE: kie has never run on 1xMI300X" in text
    assert "ESTIMATE" in markdown([one])
    measured = roofline("laneformer-2b", machine("H200"), 128)
    assert measured.constants == ()
    assert "ESTIMATE" not in table(measured) + markdown([measured])


def test_cards_are_estimates_and_stand_in_the_docs() -> None:
    """By hand: 16 GB/s on each of 108 multiprocessors, of which 95 % are kept."""
    old = roofline("laneformer-2b", machine("A100"), 128)
    assert old.stream_us == pytest.approx(4455e6 / (108 * 16e3) / 0.95, rel=0.01)
    new = roofline("laneformer-2b", machine("RTX 5090"), 128)
    assert new.stream_us == pytest.approx(4455e6 / (1792e3 * 4550 / 4800) / 0.95, rel=0.01)
    for card in CARDS:
        one = roofline("llama-3.2-1b", machine(card.name))
        assert f"ESTIMATE: kie has never run on 1x{card.name}" in table(one)
    text = (ROOT / "docs" / "nvidia.md").read_text()
    assert cards() in text
    assert "kie has never run on any of these cards" in text


def test_a_plan_of_a_recorded_machine_ends_with_its_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = ROOT / "crates" / "kie-kccl" / "topologies"
    words = ("--plan", "--topology", str(folder / "mi300xx8.json"))
    command("info", str(ROOT / "tests" / "data" / "own_laneformer_mixed"), *words)
    assert "ESTIMATE: kie has never run on 8xMI300X" in capsys.readouterr().out


def command(*words: str) -> None:
    """Runs the command line, which ends the process with 0."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 0


def test_this_machine_is_measured() -> None:
    found = roofline(None, machine("cpu"), 128)
    assert found.bandwidth_gb_s > 0
    assert found.limit == "memory bandwidth"


def test_it_prints_its_terms(capsys: pytest.CaptureFixture[str]) -> None:
    eight = machine("8xH200")
    text = table(roofline("qwen3-coder-next", eight))
    for word in ("ceiling", "chosen experts", "302 exchanges", "limit:", "3,650 tok/s"):
        assert word in text
    assert markdown([roofline(name, eight) for name in COUNTED]).count("\n") == 5
    command("bench", "roofline", *COUNTED, "--device", "8xh200")
    assert "| 325 (Kog, projection) |" in capsys.readouterr().out
    command("bench", "roofline", "gpt-oss-120b", "--device", "H100", "--json")
    (found,) = json.loads(capsys.readouterr().out)
    assert found["estimate_tok_s"] < found["ceiling_tok_s"]


def test_what_it_does_not_know_is_named(tmp_path: Path) -> None:
    for device in ("8xA380", "3xH200", "x", ""):
        with pytest.raises(kie.InvalidRequestError):
            machine(device)
    with pytest.raises(kie.InvalidRequestError):
        machine("auto", tmp_path / "none.json")
    with pytest.raises(kie.LoadError):
        roofline("no-such-model", machine("H200"))
    with pytest.raises(kie.InvalidRequestError):
        roofline("gpt-oss-120b", machine("H200"), 0)
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "mamba"}')
    with pytest.raises(kie.UnsupportedModelError, match="mamba"):
        roofline(str(path), machine("H200"))
    path.write_text('{"model_type": "gpt_oss", "hidden_size": 8}')
    with pytest.raises(kie.UnsupportedModelError, match="num_hidden_layers"):
        roofline(str(tmp_path), machine("H200"))
