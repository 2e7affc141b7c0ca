"""The manual: links lead somewhere, commands parse, code compiles and what is marked runs.

A block below the line `<!-- run -->` is executed, all of a page in one namespace.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kie
import pytest
from kie import cli, sampling
from serving import serving

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "benches")]

import pages  # noqa: E402
import peers  # noqa: E402
import terminal  # noqa: E402

DOCS = ROOT / "docs"
BASELINES = ROOT / "benches" / "baselines.jsonl"
MADE = pages.pages()
WRITTEN = sorted(DOCS.rglob("*.md"))
READABLE = [ROOT / "README.md", *WRITTEN]
BLOCK = re.compile(r"^(<!-- run -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> Iterator[tuple[bool, str]]:
    for run, kind, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if kind == language:
            yield bool(run), code


def anchors(text: str) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


@pytest.mark.parametrize("page", READABLE, ids=names(READABLE))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]*))?\)", text):
        if "://" in target:
            own = target.removeprefix(pages.SOURCE)
            assert own == target or (ROOT / own).exists(), target
            continue
        file = (page.parent / target).resolve() if target else page
        made = MADE.get(file.relative_to(DOCS).as_posix()) if file.is_relative_to(DOCS) else None
        chart = file.parent.name == "pictures" and (ROOT / "benches" / file.name).exists()
        assert made or chart or file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(made or file.read_text(encoding="utf-8")), anchor


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:")[1]
    listed = set(re.findall(r"[\w/-]+\.md", navigation))
    assert listed == {path.relative_to(DOCS).as_posix() for path in WRITTEN} | set(MADE)


@pytest.mark.parametrize("page", READABLE, ids=names(READABLE))
def test_python_blocks_compile_and_commands_parse(page: Path) -> None:
    for _, code in blocks(page, "python"):
        compile(code, page.name, "exec")
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for _, code in blocks(page, "console"):
        for line in code.splitlines():
            program, *words = shlex.split(line, comments=True)
            if program == "docker":
                # What stands behind the image is what its entry point gets.
                program, words = "kie", words[words.index("IMAGE") + 1 :]
            if program == "kie":
                cli.parser(words).parse_args(words)
            else:
                assert program == "make", line
                assert re.search(rf"^{words[0]}:", targets, re.MULTILINE), line


@pytest.mark.parametrize("page", WRITTEN, ids=names(WRITTEN))
def test_marked_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for run, code in blocks(page, "python"):
        if run:
            exec(compile(code, page.name, "exec"), space)


def test_some_blocks_are_marked() -> None:
    count = {page.stem: sum(run for run, _ in blocks(page, "python")) for page in WRITTEN}
    assert count["quickstart"] >= 5
    assert count["agents"] >= 5


def test_every_option_of_engine_is_explained() -> None:
    page = MADE["reference/python.md"]
    documented = pages.arguments_of(inspect.getdoc(kie.Engine) or "")
    taken = set(inspect.signature(kie.Engine).parameters)
    assert set(documented) == taken, "the docstring names what Engine takes"
    for name in taken:
        row = re.search(rf"^\| `{name}` \|.*\| (.*) \|$", page, re.MULTILINE)
        assert row, name
        assert len(row[1]) > 3, name
    for name in sampling.SamplingParams.__dataclass_fields__:
        assert f"| `{name}` |" in page


def test_everything_public_is_in_the_reference() -> None:
    page = MADE["reference/python.md"]
    other = {"FinishReason", "Info", "Message", "Metrics", "Sampling", "__version__", "doctor"}
    for name in set(kie.__all__) - other:
        assert f"kie.{name}" in page, name


def test_every_command_is_in_the_reference() -> None:
    page = MADE["reference/command-line.md"]
    for verb in cli.VERBS:
        assert f"\n## kie {verb}" in page, verb
    assert page.count("--max-tokens N") >= 2
    assert "\n## kie bench latency\n" in page


def test_the_paths_of_the_server_are_its_routes() -> None:
    routes = (ROOT / "crates/kie-server/src/router.rs").read_text(encoding="utf-8")
    table = (DOCS / "server.md").read_text(encoding="utf-8")
    paths = re.findall(r"`(/[\w/]*)`", table)
    for path in paths:
        assert f'.route("{path}"' in routes or path == "/", path
    assert set(re.findall(r'\.route\("([^"{]*)"', routes)) <= set(paths), "a path is missing"


def test_the_openai_client_of_the_server_page_works(capsys: pytest.CaptureFixture[str]) -> None:
    code = next(code for _, code in blocks(DOCS / "server.md", "python"))
    with serving() as server:
        here = code.replace("http://127.0.0.1:8000", server.url)
        assert here != code
        exec(compile(here, "server.md", "exec"), {})
    assert "def count_vowels" in capsys.readouterr().out


def test_the_terminal_picture_is_what_the_model_says(demo: kie.Engine) -> None:
    assert terminal.FILE.read_text(encoding="utf-8") == terminal.drawn(terminal.conversation(demo))


def test_architectures_are_those_of_the_registry() -> None:
    source = (ROOT / "crates/kie-core/src/model/mod.rs").read_text(encoding="utf-8")
    table = source.split("const REGISTRY")[1].split("];")[0]
    known = set(re.findall(r"\(\"(\w+)\",", table))
    for page in (ROOT / "README.md", DOCS / "models.md"):
        row = re.search(r"^\| architectures \| (.*) \|$", page.read_text(encoding="utf-8"), re.M)
        assert row, page
        for name in known - {"laneformer_tp", "kie_hybrid"}:  # a dialect, and a fixture's
            assert name in row[1], f"{page.name}: {name}"


def test_claims_of_the_default_model_are_its_evaluation() -> None:
    path = ROOT / "python/kie/demo/training.json"
    rates = json.loads(path.read_text(encoding="utf-8"))["evaluation"]
    assert rates["new_held_greedy"]["all"] == "497 of 500"
    hand = [rates[f"new_hand_{form}_greedy"]["all"] for form in ("docstring", "chat")]
    passed, tasks = (sum(int(rate.split(" of ")[i]) for rate in hand) for i in (0, 1))
    assert tasks / passed == pytest.approx(6, abs=0.5), "about one in six"
    for page in (ROOT / "README.md", DOCS / "models.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert "497" in text
        assert "one in six" in text


def test_figures_of_peers_on_a_cpu_are_recorded() -> None:
    lines = BASELINES.read_text(encoding="utf-8").splitlines()
    runs = [json.loads(line) for line in lines]
    run = [run for run in runs if run["bench"] == "cpu_peers"][-1]
    text = (DOCS / "figures.md").read_text(encoding="utf-8")
    for encoding, found in run.get("results", {"BF16": run}).items():
        for engine in ("kie", "llama.cpp", "transformers"):
            if engine in found:
                assert f"{found[engine]['decode_tok_per_s']:.1f}" in text, (encoding, engine)
                assert f"{found[engine]['prefill_512_tok_per_s']:.0f}" in text, (encoding, engine)
    assert peers.BEGIN in text
    assert peers.END in text.split(peers.BEGIN)[1]


def test_the_table_of_peers_is_made_of_undisturbed_rounds() -> None:
    def rounded(before: float, after: float, speed: float) -> dict[str, object]:
        kie_row = {"decode": speed, "prefill": 100.0, "bytes": 2_000_000_000}
        rows = {"BF16 kie": kie_row, "BF16 llama.cpp": {"decode": 3.0, "prefill": 40.0}}
        return {"before": before, **rows, "after": after}

    found = peers.summary([rounded(30, 30, 12), rounded(30, 10, 90), rounded(31, 29, 14)])
    assert found["undisturbed"] == 2
    assert found["read_bandwidth_gb_per_s"] == 30
    assert found["results"]["BF16"]["kie"]["decode_tok_per_s"] == 13
    about = {"machine": "m", "threads": 2, "date": "d", "first_token_ms": 1.5, "versions": {}}
    made = peers.table({**found, **about})
    assert "| BF16 | 2.00 | kie | 13.0 | 87% | 100 |" in made
    assert "| BF16 | 2.00 | llama.cpp | 3.0 | 20% | 40 |" in made
    alone = peers.table({**peers.summary([rounded(30, 10, 90)]), **about})
    assert "all of them disturbed" in alone


def test_figures_of_readme_and_manual_stand_in_the_results() -> None:
    results = (ROOT / "benches/gpu/RESULTS.md").read_text(encoding="utf-8")
    for page in (ROOT / "README.md", DOCS / "figures.md"):
        text = page.read_text(encoding="utf-8")
        figures = re.findall(r"\d[\d,.]*(?= µs)", text)
        assert len(figures) >= 7
        for figure in figures:
            assert figure in results, f"{page.name}: {figure}"


def test_charts_and_tables_tell_one_figure(tmp_path: Path) -> None:
    """All from baselines.jsonl: charts drawn again are the same, and their bars stand in tables."""
    drawn = [sys.executable, str(ROOT / "benches/gpu/chart.py"), str(BASELINES), str(tmp_path)]
    subprocess.run(drawn, check=True)
    results = (ROOT / "benches/gpu/RESULTS.md").read_text(encoding="utf-8")
    for name in ("decode.svg", "scaling.svg"):
        chart = (tmp_path / name).read_text(encoding="utf-8")
        assert chart == (ROOT / "benches" / name).read_text(encoding="utf-8"), name
        bars = re.findall(r">([\d,]+) µs<", chart)
        assert len(bars) > 3
        for figure in bars:
            assert re.search(rf"\b{figure}\b", results), f"{name}: {figure} µs"
