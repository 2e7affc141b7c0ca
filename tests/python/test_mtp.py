"""Layers of multi-token prediction draft tokens, and change none."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kie
import numpy as np
import pytest
from conftest import DATA, ROOT
from kie.cli import main

sys.path.insert(0, str(ROOT / "tools" / "fixtures"))
import container

FOLDER = DATA / "own_qwen3_next"
DRAFTS = 3
MTP: dict[str, Any] = {"speculate": "mtp"}


def told(done: kie.Completion) -> tuple[Any, ...]:
    """All of an answer but its times."""
    return done.text, done.token_ids, done.finish_reason, done.stop_reason, done.logprobs


def recorded(name: str) -> Any:
    """Numbers of the fixture's golden, in float64's own arithmetic."""
    stored = container.read(FOLDER / "golden.safetensors")[name]
    return container.decode(stored).astype(int).tolist()


def counts(ids: list[int], drafts: list[list[int]]) -> tuple[int, int]:
    """Tokens drafted and accepted on the way to `ids`, where `drafts[n]` follow the n-th: as many
    as lookup.rs would have, `DRAFTS` at most.
    """
    reach, misses, rest, made = 7, 0, 0, 1
    drafted = accepted = 0
    while made < len(ids):
        most = 0 if rest else min(reach, len(ids) - made - 1, DRAFTS)
        rest = max(rest - 1, 0)
        few = drafts[made - 1][:most]
        pairs = zip(few, ids[made:], strict=False)
        right = next((n for n, (a, b) in enumerate(pairs) if a != b), len(few))
        if few:
            misses = 0 if right else min(misses + 1, 6)
            if right:
                reach = 7 if right == len(few) else min(7, 2 * right + 1)
            else:
                rest, reach = 2 ** (misses - 1) - 1, 1 if misses > 1 else reach
        drafted, accepted, made = drafted + len(few), accepted + right, made + right + 1
    return drafted, accepted


@pytest.fixture(scope="module", params=["cpu", "cpu:0,1", "sim:blocks=4"])
def engine(request: pytest.FixtureRequest) -> Iterator[kie.Engine]:
    """The fixture with its layer that predicts."""
    device = request.param
    with kie.Engine(FOLDER, device=device, threads=1, max_seq_len=256, mtp=True) as opened:
        yield opened


@pytest.mark.parametrize("which", range(3))
def test_drafts_are_those_of_the_reference(engine: kie.Engine, which: int) -> None:
    prompt, ids = (recorded(f"prompt_{which}.{name}") for name in ("ids", "gen_ids"))
    wanted = counts(ids, recorded(f"prompt_{which}.drafts"))
    assert 10 < wanted[1] < wanted[0]
    params: dict[str, Any] = {"max_tokens": len(ids), "temperature": 0, "ignore_eos": True}
    done = engine.generate(prompt, **params, **MTP)
    assert list(done.token_ids) == ids
    assert (done.timings.draft_n, done.timings.draft_n_accepted) == wanted


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.9, "seed": 3, "logprobs": 2},
        {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": [7, 300], "logit_bias": {8: 4.0}},
        {"temperature": 0.0, "prediction": [5, 6, 7]},
        {"temperature": 0.8, "grammar": kie.Regex("[a-z ]{12,40}")},
    ],
    ids=str,
)
def test_no_token_changes(engine: kie.Engine, params: dict[str, Any]) -> None:
    fixed: dict[str, Any] = {"max_tokens": 40, "seed": 1} | params
    plain = [engine.generate([5, 6, 7 + n] * 9, **fixed) for n in range(3)]
    with ThreadPoolExecutor(3) as pool:
        # Beside each other, and one without.
        kinds = [MTP, MTP, {}]
        jobs = [
            pool.submit(engine.generate, [5, 6, 7 + n] * 9, **fixed, **kinds[n]) for n in range(3)
        ]
        assert [told(job.result()) for job in jobs] == [told(done) for done in plain]


def test_prefixes_turns_and_forks(engine: kie.Engine) -> None:
    answers = []
    # The last pair: a turn that drafts behind one whose output the layer has not seen on a GPU.
    for before, extra in (({}, {}), (MTP, MTP), ({}, MTP)):
        with engine.session() as chat:
            params: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
            turns = [chat.stream("ab cd " * 12, **params, **before).result()]
            other = chat.fork()
            turns += [chat.stream("ab", **params, **extra).result()]
            turns += [other.stream("cd", **params, **extra).result()]
            chat.rollback(to=1)
            turns.append(chat.stream("e", **params, **extra).result())
            answers.append([told(turn) for turn in turns])
    assert answers[0] == answers[1] == answers[2]
    # Of a prompt that is there already the layer has seen all, too.
    prompt = [3 * n % 500 for n in range(100)]
    params = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, **MTP}
    first, second = (engine.generate(prompt, **params) for _ in range(2))
    assert second.usage.cached_tokens >= 64
    assert told(first) == told(second)
    drafted = [(d.timings.draft_n, d.timings.draft_n_accepted) for d in (first, second)]
    assert drafted[0] == drafted[1]


def test_as_many_at_once_as_there_are_columns(engine: kie.Engine) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "seed": 2, "max_tokens": 12, "ignore_eos": True}
    prompts = [[9 + n, 4, 30 - n] * 7 for n in range(9)]
    plain = [engine.generate(prompt, **params) for prompt in prompts]
    with ThreadPoolExecutor(9) as pool:
        jobs = [pool.submit(engine.generate, prompt, **params, **MTP) for prompt in prompts]
        assert [told(job.result()) for job in jobs] == [told(done) for done in plain]


def test_drafts_end_where_the_context_does(engine: kie.Engine) -> None:
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    plain, drafted = (engine.generate([5] * 200, **params, **e) for e in ({}, MTP))
    assert told(plain) == told(drafted)
    assert len(plain.token_ids) == 56


def test_models_without_are_refused(tmp_path: Path) -> None:
    known = "mtp=True: no layer of multi-token prediction is known of llama"
    with pytest.raises(kie.InvalidRequestError, match=known):
        kie.Engine(DATA / "llama", device="cpu", mtp=True)
    # A checkpoint whose layer was left out.
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    stored = container.read(FOLDER / "model.safetensors")
    less = {name: raw for name, raw in stored.items() if name != "mtp.fc.weight"}
    (folder / "model.safetensors").unlink()
    container.write(folder / "model.safetensors", less, {"format": "pt"})
    with pytest.raises(kie.LoadError, match=r"mtp\.fc\.weight"):
        kie.Engine(folder, device="cpu", mtp=True)
    with kie.Engine(folder, device="cpu") as opened:
        assert opened.generate([5], max_tokens=1, temperature=0).token_ids


def test_a_layer_that_is_not_finite_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(FOLDER, folder)
    stored = container.read(FOLDER / "model.safetensors")
    bad = np.full(stored["mtp.norm.weight"].shape, np.nan)
    (folder / "model.safetensors").unlink()
    container.write(
        folder / "model.safetensors",
        stored | {"mtp.norm.weight": container.encode(bad, "BF16")},
        {},
    )
    with pytest.raises(kie.LoadError, match=r"mtp\.norm\.weight"):
        kie.Engine(folder, device="cpu", mtp=True)


def test_the_command_line_loads_what_it_speculates_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = []
    for extra in ([], ["--speculate", "mtp"]):
        words = ["-m", str(FOLDER), "--device", "cpu", "-t", "0", "-n", "12", "--ignore-eos"]
        with pytest.raises(SystemExit) as ended:
            main(["run", *words, *extra, "ab"])
        assert not ended.value.code
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    steps = []
    for extra in ([], ["--mtp"]):
        with pytest.raises(SystemExit):
            main(["info", str(FOLDER), "--plan", "--device", "cpu", *extra])
        [found] = re.findall(r"(\d+) steps", capsys.readouterr().out)
        steps.append(int(found))
    assert steps[0] + 8 < steps[1]
