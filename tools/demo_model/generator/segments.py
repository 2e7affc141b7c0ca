"""A document: texts in order, each of which the model learns, or only reads."""

from __future__ import annotations

Segment = tuple[str, bool]

USER = "<|start_header_id|>user<|end_header_id|>\n\n"
ASSISTANT = "<|start_header_id|>assistant<|end_header_id|>\n\n"


def chat(turns: list[tuple[str, str]]) -> list[Segment]:
    """(question, answer) pairs; questions are read, answers are learned."""
    out = [("<s>", False)]
    for user, assistant in turns:
        out.append((f"{USER}{user.strip()}</s>{ASSISTANT}", False))
        out.append((assistant.strip() + "</s>", True))
    return out
