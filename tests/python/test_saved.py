"""Sessions as files, from Python: what comes back, and which exception what is no such file is."""

from __future__ import annotations

from pathlib import Path

import kie
import pytest


def ask(session: kie.Session, text: str) -> kie.Completion:
    return session.stream(text, max_tokens=16, temperature=0, ignore_eos=True).result()


def test_a_session_goes_on_in_another_engine(tmp_path: Path) -> None:
    path = tmp_path / "turns.kie"
    with kie.Engine(device="cpu", max_seq_len=1024) as engine:
        session = engine.session()
        ask(session, "Write a function that adds two numbers. " * 20)
        session.save(path)
        wanted = ask(session, "Now subtract.")
    with kie.Engine(device="cpu", max_seq_len=1024) as engine:
        loaded = engine.load_session(str(path))
        assert loaded.turns == 1
        got = ask(loaded, "Now subtract.")
        assert got.token_ids == wanted.token_ids
        assert got.usage.cached_tokens == wanted.usage.cached_tokens > 64


def test_what_is_no_session_is_a_typed_error(tmp_path: Path) -> None:
    with kie.Engine(device="cpu", max_seq_len=256) as engine:
        path = tmp_path / "turns.kie"
        path.write_bytes(b"no session at all")
        with pytest.raises(kie.LoadError, match=r"turns\.kie.*session\.save") as told:
            engine.load_session(path)
        assert "Session.save" in (told.value.hint or "")
        with pytest.raises(kie.LoadError, match="nowhere"):
            engine.load_session(tmp_path / "nowhere")
        with pytest.raises(TypeError):
            engine.load_session(3)  # type: ignore[arg-type]
        session = engine.session()
        ask(session, "hi")
        with pytest.raises(kie.KieError) as caught:
            session.save(tmp_path / "no" / "folder")
        assert caught.value.code == "write"
        session.save(path)
        assert engine.load_session(path).turns == 1
