"""Whatever waits hears Ctrl-C and `timeout=`: templates, tokenizers, turns, logits, iterables.

Noticed within 50 ms on a quiet machine; the bounds here are a busy one's, and below what each of
them took before it listened.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import kie
import pytest
from conftest import TINY

HEARD_S_MAX = 1.5

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"

CALLS = {
    "template": "engine.apply_chat_template([{'role': 'user', 'content': 'a'}])",
    "messages": "engine.generate(messages=[{'role': 'user', 'content': 'a'}])",
    "text": "engine.tokenize('some words, and more. ' * 500_000)",
    "prompt": "engine.generate('some words, and more. ' * 500_000)",
    "logits": "demo.logits([5] * 1900, path='decode')",
    "turn": "chat.stream('b', max_tokens=5)",
    "fork": "chat.fork()",
    "iterable": "engine.detokenize(Long())",
    "stops": "engine.generate([1], stop=Slow())",
}


def templated(folder: Path) -> Path:
    """The tiny model with a template that does not end by itself."""
    for file in TINY.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(ENDLESS)
    return folder


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_is_heard_in(name: str, tmp_path: Path) -> None:
    script = f"""
        import itertools, os, signal, threading, time, kie
        class Long:
            def __len__(self): return 10**9
            def __iter__(self): return itertools.repeat(5)
        class Slow:
            def __iter__(self):
                while True:
                    time.sleep(0.01)
                    yield "stop"
        name = {name!r}
        engine = kie.Engine({str(templated(tmp_path))!r}, device="cpu", threads=1)
        if name in ("logits", "turn", "fork"):
            demo = kie.Engine(device="cpu", threads=1)
            chat = demo.session()
            kept = chat.stream("def f", max_tokens=1900, ignore_eos=True)
        def press():
            global pressed
            time.sleep(0.15)
            pressed = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        try:
            {CALLS[name]}
            print("it ended by itself")
        except KeyboardInterrupt:
            print(time.monotonic() - pressed)
            if name not in ("logits", "turn", "fork"):
                done = engine.generate([5, 6], max_tokens=2, temperature=0, ignore_eos=True)
                assert len(done.token_ids) == 2
        import sys; sys.stdout.flush(); os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < HEARD_S_MAX


def test_a_timeout_begins_with_the_call(tmp_path: Path) -> None:
    with kie.Engine(templated(tmp_path), device="cpu", threads=1) as engine:
        for prompt in (
            {"messages": [{"role": "user", "content": "a"}]},
            {"prompt": "a b " * 10**6},
        ):
            begun = time.monotonic()
            done = engine.generate(**prompt, timeout=0.1)  # type: ignore[call-overload]
            assert done.finish_reason == "timeout"
            assert done.token_ids == ()
            assert done.text == ""
            assert time.monotonic() - begun < 30
        assert engine.generate([5], max_tokens=1, timeout=60).finish_reason in ("length", "stop")


def test_a_timeout_before_its_turn_leaves_the_session(demo: kie.Engine) -> None:
    chat = demo.session()
    first = chat.stream("def f", max_tokens=1500, ignore_eos=True)
    late = chat.stream("def g", max_tokens=5, timeout=0.05)
    assert late.result().finish_reason == "timeout"
    assert chat.turns == 1
    first.cancel()
    assert len(chat.stream("def h", max_tokens=5, ignore_eos=True).result().token_ids) == 5
    assert chat.turns == 2


def test_what_is_longer_than_the_context_is_refused_unread(engine: kie.Engine) -> None:
    class Lying:
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> object:
            return itertools.repeat(1)

    for prompt in (range(10**12), [1] * 10**6):
        with pytest.raises(kie.ContextLengthError) as caught:
            engine.generate(prompt)
        assert caught.value.context["prompt_tokens"] == len(prompt)
    with pytest.raises(kie.ContextLengthError):
        engine.logits(range(10**12))
    for call in (engine.generate, engine.logits):
        with pytest.raises(kie.InvalidRequestError, match="at most"):
            call(Lying())  # type: ignore[operator]
    with pytest.raises(kie.InvalidRequestError, match="at most"):
        engine.generate("a", stop=itertools.repeat("a"))  # type: ignore[call-overload]
    with pytest.raises(kie.InvalidRequestError, match="at most"):
        engine.generate("a", logit_bias=dict.fromkeys(range(5000), 0.0))


def test_rules_that_multiply_are_refused(tmp_path: Path) -> None:
    tenfold = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 10}
    for file in TINY.iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / "tokenizer.json"
    file.unlink()
    whole = json.loads((TINY / "tokenizer.json").read_text())
    rows = {"type": "Sequence", "normalizers": [tenfold] * 12}
    file.write_text(json.dumps(whole | {"normalizer": rows}))
    with kie.Engine(tmp_path, device="cpu", threads=1) as engine:
        assert engine.tokenize("bcd", add_special=False)
        with pytest.raises(kie.InvalidRequestError, match="normalizer"):
            engine.tokenize("aqc")
    file.write_text(
        json.dumps(whole | {"decoder": {"type": "Sequence", "decoders": [tenfold] * 12}})
    )
    with pytest.raises(kie.LoadError, match=r"tokenizer.json: decoder: .*bytes"):
        kie.Engine(tmp_path, device="cpu")
