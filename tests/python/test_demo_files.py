"""The default model's folder is whole, and NOTICE names everything it was trained on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "python" / "kie" / "demo"
sys.path.insert(0, str(ROOT / "tools" / "fixtures"))

import container  # noqa: E402


def test_notice_names_every_package_of_the_training_data() -> None:
    packages = json.loads((DEMO / "training.json").read_text())["data"]["packages"]
    lines = (ROOT / "NOTICE").read_text().splitlines()
    assert len(packages) > 100
    for name, entry in packages.items():
        assert f"{name} {entry['version']}: {entry['licence']}" in lines


def test_shards_hold_what_the_index_says() -> None:
    index = json.loads((DEMO / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    size = 0
    for shard in sorted(set(index["weight_map"].values())):
        for name, raw in container.read(DEMO / shard).items():
            found[name] = shard
            size += len(raw.data)
    assert found == index["weight_map"]
    assert size == index["metadata"]["total_size"]


@pytest.mark.parametrize("document", sorted(DEMO.glob("*.json")), ids=lambda path: path.name)
def test_documents_name_no_place(document: Path) -> None:
    text = document.read_text()
    assert not any(word in text for word in ("/home/", "/root/", "/tmp/", "/Users/"))
