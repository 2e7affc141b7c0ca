"""The generator of the default model's training text: a seed names its text, and programs work."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "demo_model"
sys.path.insert(0, str(TOOLS))

from generator import families, parts, recipes, sources  # noqa: E402
from generator.documents import document, documents, held_out_tasks  # noqa: E402
from generator.pipeline import held_out  # noqa: E402
from generator.program import Program  # noqa: E402

# The first 1,000 documents of the published run's first shard.
FIRST_SHARD = "5d2a56a915d17727fce008a8768c79a89370e0f0af00c9e98b7ee10caf2fb683"
# The 500 tasks that the published pass rate is of.
HELD_OUT = "81227f4c59f89c09c9ba49a3529c07f8694e4212b88705fe4af6e48c7e871023"


def test_the_first_documents_are_those_of_the_published_run() -> None:
    found = json.dumps(list(documents(1_000_003, 1000)))
    assert hashlib.sha256(found.encode()).hexdigest() == FIRST_SHARD


def test_held_out_tasks_are_those_that_the_model_is_measured_on() -> None:
    found = json.dumps(held_out_tasks(500))
    assert hashlib.sha256(found.encode()).hexdigest() == HELD_OUT


def test_another_process_draws_the_same(tmp_path: Path) -> None:
    texts = []
    for seed in ("1", "2"):
        out = tmp_path / seed
        command = [sys.executable, str(TOOLS / "generate.py"), "text", "200", str(out)]
        subprocess.run(command, check=True, env={"PYTHONHASHSEED": seed})
        texts.append(out.read_text())
    assert texts[0] == texts[1]
    assert "<s>" not in texts[0]


@pytest.mark.parametrize("family", families.WEIGHTS, ids=lambda family: family.__name__)
def test_programs_of_a_family_do_what_is_asked(family: families.Callable[..., object]) -> None:
    r = random.Random(7)
    for _ in range(40):
        task = family(r)
        if task.valid() and (tests := Program(r, task).verify(r, 4)) is not None:
            assert all(len(test[0]) == len(task.params()) for test in tests)
            return
    pytest.fail("no program of this family was right")


def test_a_wrong_program_is_refused() -> None:
    r = random.Random(3)
    task = families.two_lists(r)
    program = Program(r, task)
    assert program.verify(r, 4) is not None
    program.lines = ["return 'nothing'"]
    assert program.verify(r, 4) is None


def test_no_document_has_a_held_out_composition(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    verify = Program.verify

    def noted(self: Program, *args: object) -> object:
        seen.append(self.task.key)
        return verify(self, *args)

    monkeypatch.setattr(Program, "verify", noted)
    assert len(list(documents(11, 400))) == 400
    composed = [key for key in seen if not key.startswith("single|")]
    assert len(composed) > 200
    assert not any(held_out(key) for key in composed)


def test_every_recipe_can_be_drawn() -> None:
    r = random.Random(5)
    for bag in (*parts.PREDICATES.values(), *parts.MAPS.values(), parts.OPERATIONS):
        for key in bag.named:
            assert bag.get(r, key).name
    for key in parts.AGGREGATES.named:
        assert parts.AGGREGATES.get(r, key).verbs
    for key in sources.NAMED:
        assert sources.source(r, key).params


def test_a_document_says_what_is_learned() -> None:
    r = random.Random(1)
    found = [d for d in (document(r) for _ in range(50)) if d]
    assert len(found) > 40
    for segments in found:
        assert segments[0][0].startswith("<s>")
        assert segments[-1][1]
        assert segments[-1][0].endswith("</s>")


def test_places_are_filled_in_order() -> None:
    counted = iter(range(3))
    names = {"n": lambda: next(counted), "word": "x"}
    assert recipes.fill("${n()} $word ${ {'a': n()}['a'] }${n()}", names) == "0 x 12"
    with pytest.raises(ValueError, match="no closing brace"):
        recipes.fill("${n()", names)
