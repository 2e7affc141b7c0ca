"""Draws docs/pictures/terminal.svg: what the default model answers, greedy, as a terminal shows it.

python tools/terminal.py
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import kie

FILE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "terminal.svg"
TURNS = (
    "Write a function sum_even_squares(numbers) that returns "
    "the sum of the squares of the even numbers.",
    "Now make it ignore negative numbers.",
)
LINE, LEFT, TOP, WIDTH = 20, 18, 30, 830


def conversation(engine: kie.Engine) -> list[str]:
    """The lines of a chat: questions behind a prompt sign, answers as they are."""
    lines = ["$ kie chat -t 0"]
    session = engine.session()
    for question in TURNS:
        message = {"role": "user", "content": question}
        answer = session.stream(messages=[message], temperature=0, max_tokens=200).result()
        lines += [f"> {question}", *answer.text.splitlines(), ""]
    return lines[:-1]


def drawn(lines: list[str]) -> str:
    """The lines as an SVG."""
    height = TOP + LINE * len(lines) + 6
    rows = [
        f'<text x="{LEFT}" y="{TOP + LINE * n}" class="{"ask" if line[:1] in "$>" else "said"}" '
        f'xml:space="preserve">{escape(line, quote=False)}</text>'
        for n, line in enumerate(lines)
        if line
    ]
    style = (
        "text { font: 13px ui-monospace, Menlo, Consolas, monospace } "
        ".ask { fill: #8b98a5 } .said { fill: #e6edf3 }"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">'
    )
    title = "<title>kie chat with the default model: a function, and an edit of it</title>"
    back = f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#0d1117"/>'
    return "\n".join([head, title, f"<style>{style}</style>", back, *rows, "</svg>"]) + "\n"


if __name__ == "__main__":
    with kie.Engine(device="cpu") as opened:
        FILE.write_text(drawn(conversation(opened)), encoding="utf-8")
