"""Answers whose text is that of a grammar, from models whose weights are random."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kie
import pydantic
import pytest
from conftest import DATA, TINY
from schemas import SCHEMAS

LONG = 480
"""Tokens for an answer: any of these schemas can be ended with them."""


@pytest.fixture(scope="module")
def many() -> Iterator[kie.Engine]:
    """Several requests at once."""
    with kie.Engine(TINY, device="cpu", threads=1, max_batch=4) as opened:
        yield opened


def checked(done: kie.Completion, schema: Any) -> Any:
    """The value of an answer, which is valid."""
    assert done.finish_reason in ("stop", "length"), done
    value = json.loads(done.text)
    validator: Any = jsonschema.Draft202012Validator(schema)
    validator.validate(value)
    return value


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_is_valid(many: kie.Engine, temperature: float) -> None:
    reasons: set[str] = set()
    for n, schema in enumerate(SCHEMAS):
        jsonschema.Draft202012Validator.check_schema(schema)
        done = many.generate(
            f"{n}:",
            grammar=kie.JsonSchema(schema),
            max_tokens=LONG,
            temperature=temperature,
            seed=n,
        )
        checked(done, schema)
        reasons.add(done.finish_reason)
    assert len(SCHEMAS) >= 100
    assert reasons == {"stop", "length"}


def test_budgets_close_what_was_begun(many: kie.Engine) -> None:
    schema = SCHEMAS[6]
    for most in (25, 40, 64, 100):
        done = many.generate("x", grammar=kie.JsonSchema(schema), max_tokens=most, seed=most)
        assert len(done.token_ids) <= most
        checked(done, schema)
    cut = many.generate("x", grammar=kie.JsonSchema(schema), max_tokens=3, seed=1)
    assert cut.finish_reason == "length"
    assert len(cut.token_ids) == 3


def test_everything_goes_together(many: kie.Engine) -> None:
    grammar = kie.Regex(r"(ab|cd)+[0-9]{3}!")
    keywords: dict[str, Any] = {"grammar": grammar, "max_tokens": 60}
    variants: list[dict[str, Any]] = [
        {"temperature": 0},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logprobs": 3},
        {"min_tokens": 4},
        {"logit_bias": {5: -100.0}},
        {"stop": ["7"]},
        {"stop_token_ids": [7]},
    ]
    alone = [many.generate("x", seed=3, **keywords, **more) for more in variants]
    for more, done in zip(variants, alone, strict=True):
        if "stop" in more and done.finish_reason == "stop" and done.stop_reason == "7":
            assert "7" not in done.text
        elif "stop_token_ids" not in more:
            assert re.fullmatch(r"(ab|cd)+[0-9]{3}!", done.text), (more, done.text)
        if "logprobs" in more:
            assert done.logprobs is not None
            assert len(done.logprobs) == len(done.token_ids)
        if "min_tokens" in more:
            assert len(done.token_ids) >= 4
    # The same beside others, and as a batch.
    running = [many.stream("x", seed=3, **keywords, **more) for more in variants]
    assert [stream.result().token_ids for stream in running] == [d.token_ids for d in alone]
    texts = many.generate_many(["x", "y", "z"], **keywords, seed=3)
    assert texts[0].token_ids == many.generate("x", seed=3, **keywords).token_ids


def test_the_monokernel_keeps_to_it() -> None:
    with kie.Engine(TINY, device="sim:blocks=4", max_batch=4) as engine:
        running = [
            engine.stream("x", grammar=kie.JsonSchema(schema), max_tokens=60, seed=n)
            for n, schema in enumerate(SCHEMAS[:3])
        ]
        for stream, schema in zip(running, SCHEMAS, strict=False):
            checked(stream.result(), schema)


def test_sessions_and_forks(many: kie.Engine) -> None:
    with many.session() as chat:
        grammar = kie.Regex("[a-f]{8}")
        first = chat.stream("a", grammar=grammar, seed=1, max_tokens=40).result()
        other = chat.fork()
        free = chat.stream("b", seed=2, max_tokens=8).result()
        assert re.fullmatch("[a-f]{8}", first.text)
        assert len(free.token_ids) <= 8
        turns = [s.stream("c", grammar=grammar, seed=3, max_tokens=40) for s in (chat, other)]
        assert all(re.fullmatch("[a-f]{8}", turn.result().text) for turn in turns)


def test_least_tokens_hold_while_there_is_a_choice(many: kie.Engine) -> None:
    least: Any = {"min_tokens": 20, "max_tokens": 40}
    for seed in range(5):
        long = many.generate("x", grammar=kie.Regex("[ab]+"), seed=seed, **least)
        assert len(long.token_ids) >= 20
        done = many.generate("x", grammar=kie.Regex("a|b"), seed=seed, **least)
        assert (done.text in "ab", done.finish_reason) == (True, "stop")


def test_cancelled_and_late(many: kie.Engine) -> None:
    grammar = kie.JsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 300})
    with many.stream("x", grammar=grammar, ignore_eos=False) as stream:
        next(iter(stream))
        stream.cancel()
        assert stream.result().finish_reason == "cancelled"
    done = many.generate("x", grammar=grammar, timeout=0.02)
    assert done.finish_reason in ("timeout", "length")


def test_classes_of_python(many: kie.Engine) -> None:
    class Point(pydantic.BaseModel):
        x: int
        y: float | None = None

    class Line(pydantic.BaseModel):
        points: list[Point]
        name: str

    done = many.generate("x", grammar=kie.JsonSchema(Line), max_tokens=200, seed=4)
    Line.model_validate_json(done.text)
    adapter = pydantic.TypeAdapter(list[Point])
    done = many.generate("x", grammar=kie.JsonSchema(adapter), max_tokens=200, seed=5)
    adapter.validate_json(done.text)
    assert kie.JsonSchema('{"type": "null"}') == kie.JsonSchema({"type": "null"})
    assert many.generate("x", grammar=kie.JsonSchema('{"type": "null"}')).text == "null"
    lark = kie.Lark('start: "<" WORD ">"\nWORD: /[a-z]{3}/')
    assert re.fullmatch("<[a-z]{3}>", many.generate("x", grammar=lark, seed=6).text)


def test_what_is_refused(many: kie.Engine) -> None:
    with pytest.raises(kie.GrammarError, match='#/items: "uniqueItems" is not supported'):
        many.generate("x", grammar=kie.JsonSchema({"items": {"uniqueItems": True}}))
    with pytest.raises(kie.GrammarError, match="ignore_eos"):
        many.generate("x", grammar=kie.Regex("a"), ignore_eos=True)
    with pytest.raises(kie.GrammarError, match="no JSON"):
        many.generate("x", grammar=kie.JsonSchema("{"))
    with pytest.raises(kie.GrammarError, match="no JSON"):
        kie.JsonSchema({"const": {1}})
    wrong: Any = {"type": "object"}
    with pytest.raises(TypeError, match=r"kie\.JsonSchema, kie\.Regex or kie\.Lark, got dict"):
        many.generate("x", grammar=wrong)
    number: Any = 3
    with pytest.raises(TypeError, match="mapping, JSON text or a pydantic model, got int"):
        kie.JsonSchema(number)
    error = kie.GrammarError("x")
    assert (error.code, isinstance(error, kie.InvalidRequestError)) == ("grammar", True)


@pytest.mark.parametrize("folder", ["own_gemma3", "own_mistral", "qwen2"])
def test_other_tokenizers(folder: str) -> None:
    schema = SCHEMAS[0]
    with kie.Engine(DATA / folder, device="cpu", threads=1) as engine:
        room = engine.info()["context"] - 8
        done = engine.generate("a", grammar=kie.JsonSchema(schema), max_tokens=room, seed=1)
    checked(done, schema)


def test_the_command(tmp_path: Path) -> None:
    schema = SCHEMAS[0]
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    run = [sys.executable, "-m", "kie", "run", "-m", str(TINY), "--device", "cpu", "-q"]
    line = [*run, "--json-schema", str(file), "--seed", "1", "-n", "200", "x"]
    told = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    jsonschema.validate(json.loads(told.stdout), schema)
    file.write_text('{"not": {}}')
    told = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 1
    assert '"not" is not supported' in told.stderr
    line[line.index(str(file))] = str(tmp_path / "none.json")
    told = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 1
    assert "none.json" in told.stderr
