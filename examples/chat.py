"""A conversation whose keys and values stay on the device between turns.

    python examples/chat.py [MODEL]

Reads a line a turn from standard input and streams the answers; an empty line ends it.
"""

from __future__ import annotations

import sys

import kie


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else None
    with kie.Engine(model, max_batch=1) as engine, engine.session() as session:
        for line in sys.stdin:
            if not line.strip():
                break
            message = {"role": "user", "content": line.strip()}
            with session.stream(messages=[message], temperature=0, max_tokens=256) as stream:
                for text in stream.text_stream:
                    print(text, end="", flush=True)
            usage = stream.result().usage
            print(f"\n# {usage.prompt_tokens} prompt tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
