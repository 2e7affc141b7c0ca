"""What `kie chat` keeps: the turns, in a form that can be saved, loaded and shortened.

The engine's prefix cache finds their keys and values again, so nothing but text is kept here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kie.errors import InvalidRequestError
from kie.files import read_object

if TYPE_CHECKING:
    from kie.engine import Engine
    from kie.stream import Stream

FORMAT = "kie chat 1"


class Conversation:
    """A system message and turns: what was said, and what was answered."""

    def __init__(self, engine: Engine, system: str | None) -> None:
        self._engine = engine
        self.system = system
        self.turns: list[tuple[str, str]] = []
        # A model without a chat template continues the text.
        self._plain = not _has_template(engine)

    def ask(self, text: str, **sampling: Any) -> Stream:
        """The request for the answer to `text`; `answered` makes a turn of it."""
        if self._plain:
            return self._engine.stream(self._text(text), **sampling)
        return self._engine.stream(messages=self._messages(text), **sampling)

    def answered(self, text: str, answer: str) -> None:
        """Adds a turn."""
        self.turns.append((text, answer))

    def tokens(self, text: str) -> int:
        """Tokens of the prompt that `ask` would send."""
        if self._plain:
            return len(self._engine.tokenize(self._text(text)))
        rendered = self._engine.apply_chat_template(self._messages(text))
        return len(self._engine.tokenize(rendered, add_special=False))

    def shorten(self, text: str, room: int) -> int:
        """Drops the oldest turns until `text` leaves `room` tokens of the context; how many."""
        before = len(self.turns)
        limit = self._engine.info()["context"] - room
        while self.turns and self.tokens(text) > limit:
            del self.turns[0]
        return before - len(self.turns)

    def save(self, path: str) -> None:
        """Writes the conversation as JSON."""
        turns = [{"user": user, "assistant": answer} for user, answer in self.turns]
        kept = {
            "format": FORMAT,
            "model": self._engine.info()["model"],
            "system": self.system,
            "turns": turns,
        }
        text = json.dumps(kept, ensure_ascii=False, indent=2) + "\n"
        Path(path).expanduser().write_text(text, encoding="utf-8")

    def load(self, path: str) -> None:
        """Replaces the conversation by one that `save` wrote.

        Raises:
            InvalidRequestError: the file is none.
            OSError: it cannot be read.
        """
        try:
            kept = read_object(Path(path).expanduser())
            if kept["format"] != FORMAT:
                raise ValueError(f"format {kept['format']!r}")
            turns = [(str(turn["user"]), str(turn["assistant"])) for turn in kept["turns"]]
            system = cast("str | None", kept["system"])
        except (ValueError, KeyError, TypeError) as cause:
            raise InvalidRequestError(
                f"{path}: wanted a conversation that /save wrote, got {cause!r}",
                hint="/save FILE writes one",
            ) from cause
        self.turns, self.system = turns, system

    def _messages(self, text: str) -> list[dict[str, str]]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for user, answer in self.turns:
            messages += [
                {"role": "user", "content": user},
                {"role": "assistant", "content": answer},
            ]
        return [*messages, {"role": "user", "content": text}]

    def _text(self, text: str) -> str:
        return "".join([self.system or "", *(a + b for a, b in self.turns), text])


def _has_template(engine: Engine) -> bool:
    from kie.errors import TemplateError

    try:
        engine.apply_chat_template([{"role": "user", "content": "a"}])
    except TemplateError as error:
        return "has none" not in error.message and "no chat template" not in error.message
    return True
