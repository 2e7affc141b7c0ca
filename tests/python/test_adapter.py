"""LoRA adapters from Python and the command line; `tests/conformance.rs` has the numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kie
import pytest
from conftest import DATA
from kie.engine import plan_ahead

BASE, ADAPTER = DATA / "own_llama_f16", DATA / "adapter"


def test_an_adapter_changes_what_is_said_and_is_named() -> None:
    asked = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with kie.Engine(BASE, device="cpu") as engine:
        assert engine.info()["adapter"] is None
        plain = engine.generate([1, 2, 3], **asked).token_ids
    with kie.Engine(BASE, device="cpu", adapter=ADAPTER) as engine:
        info = engine.info()
        assert info["adapter"] == "adapter"
        assert "merged into 9 matrices" in info["plan"]
        adapted = engine.generate([1, 2, 3], **asked).token_ids
    assert adapted != plain
    words = [sys.executable, "-m", "kie", "info", str(BASE), "--device", "cpu", "--json"]
    told = subprocess.run(
        [*words, "--adapter", str(ADAPTER)], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(told.stdout)["adapter"] == "adapter"


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    for opening in (kie.Engine, plan_ahead):
        with pytest.raises(kie.LoadError, match=r"adapter_config\.json") as told:
            opening(BASE, device="cpu", adapter=tmp_path)
        assert "LoRA adapter's folder" in (told.value.hint or "")
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(kie.UnsupportedModelError, match=r"use_dora.*DoRA"):
        kie.Engine(BASE, device="cpu", adapter=tmp_path)
    with pytest.raises(kie.LoadError) as caught:
        kie.Engine(ADAPTER, device="cpu")
    assert "adapter=" in (caught.value.hint or "")


def test_a_session_belongs_to_its_adapter(tmp_path: Path) -> None:
    path = tmp_path / "turns.kie"
    with kie.Engine(BASE, device="cpu", adapter=ADAPTER) as engine:
        session = engine.session()
        session.stream("hello", max_tokens=2).result()
        session.save(path)
        assert engine.load_session(path).turns == 1
    with (
        kie.Engine(BASE, device="cpu") as engine,
        pytest.raises(kie.LoadError, match="weights"),
    ):
        engine.load_session(path)
