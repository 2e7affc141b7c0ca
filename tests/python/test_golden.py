"""Every checkpoint with recorded logits, through Python: both paths, and the greedy ids.

Gate: relative L2 over a prompt. F32 weights: 1e-5. Else: 2e-3 on `decode`, 1.5e-2 on `prefill`,
where activations are rounded to 16 bits.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import kie
import numpy as np
import numpy.typing as npt
import pytest
from conftest import fixture_folders
from safetensors.numpy import load_file

GATE_F32 = 1e-5
GATE = {"decode": 2e-3, "prefill": 1.5e-2}
MARGIN_MIN = 0.15
DEMO = Path(kie.__file__).parent / "demo"
FOLDERS = fixture_folders()


def stored_as_f32(folder: Path) -> bool:
    """Whether all weights of the folder are F32."""
    kinds: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        with file.open("rb") as raw:
            header = json.loads(raw.read(struct.unpack("<Q", raw.read(8))[0]))
        kinds |= {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    return kinds == {"F32"}


def distance(got: npt.NDArray[np.float32], want: npt.NDArray[np.float32]) -> float:
    """Relative L2 over a prompt, in the columns that are recorded: all, or evenly spaced ones."""
    columns = got[:, :: -(-got.shape[1] // want.shape[1])]
    wide, reference = columns.astype(np.float64), want.astype(np.float64)
    return float(np.linalg.norm(wide - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_logits_and_greedy_ids_are_the_recorded_ones(folder: Path) -> None:
    golden = load_file(folder / "golden.safetensors")
    exact = stored_as_f32(folder)
    with kie.Engine(folder, device="cpu") as engine:
        prompts = [name for name in golden if name.startswith("prompt_") and name.endswith(".ids")]
        assert len(prompts) >= 3
        for name in prompts:
            prompt = name.removesuffix(".ids")
            ids, want = golden[name].tolist(), golden[f"{prompt}.logits"]
            found = {path: engine.logits(ids, path=path) for path in ("decode", "prefill")}
            for path, got in found.items():
                gate = GATE_F32 if exact else GATE[path]
                assert distance(got, want) <= gate, (prompt, path)
            together = GATE_F32 if exact else GATE["prefill"]
            assert distance(found["decode"], found["prefill"]) <= together
            greedy = golden[f"{prompt}.gen_ids"].tolist()
            done = engine.generate(ids, temperature=0, max_tokens=len(greedy), ignore_eos=True)
            assert list(done.token_ids) == greedy, prompt


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_incremental_equals_full(folder: Path) -> None:
    golden = load_file(folder / "golden.safetensors")
    with kie.Engine(folder, device="cpu", prefix_cache=False) as engine:
        ids = golden["prompt_2.ids"].tolist() + golden["prompt_2.gen_ids"].tolist()
        whole = engine.logits(ids, path="decode")
        picked = whole[len(golden["prompt_2.ids"]) - 1 : -1].argmax(-1)
        assert picked.tolist() == golden["prompt_2.gen_ids"].tolist()
        if "prompt_2.gen_logits" in golden:
            steps = whole[len(golden["prompt_2.ids"]) - 1 : -1]
            gate = GATE_F32 if stored_as_f32(folder) else GATE["decode"]
            assert distance(steps, golden["prompt_2.gen_logits"]) <= gate


@pytest.mark.parametrize(
    "case", json.loads((DEMO / "golden.json").read_text())["prompts"], ids=lambda case: case["name"]
)
def test_the_default_model_writes_what_it_wrote(demo: kie.Engine, case: dict[str, Any]) -> None:
    ids, greedy, margins = case["prompt_ids"], case["greedy_ids"], case["margins"]
    asked: list[dict[str, Any]] = [{"prompt": case["prompt"]}, {"prompt": ids}]
    if "messages" in case:
        # The template writes the beginning-of-sequence token itself.
        assert demo.apply_chat_template(case["messages"]) == case["prompt"]
        assert demo.tokenize(case["prompt"], add_special=False) == ids
        asked[0] = {"messages": case["messages"]}
    else:
        assert demo.tokenize(case["prompt"]) == ids
    sure = next((i for i, margin in enumerate(margins) if margin < MARGIN_MIN), len(margins))
    assert sure > 0
    for how in asked:
        done = demo.generate(**how, temperature=0, max_tokens=len(greedy), ignore_eos=True)
        assert list(done.token_ids)[:sure] == greedy[:sure]
