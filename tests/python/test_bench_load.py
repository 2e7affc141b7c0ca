"""Load over HTTP, layers, neighbours, long runs, cold starts: on small models and a fake server."""

from __future__ import annotations

import asyncio
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import kie
import pytest
from conftest import TINY
from fake_server import Behaviour, FakeServer
from kie.bench import chart, coldstart, layers, mixed, report, served, soak
from kie.bench.compare import compare
from kie.cli import main


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    """A server that speaks OpenAI's API."""
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def server(fake: FakeServer) -> FakeServer:
    """The server, as it behaves when nothing is wrong."""
    fake.behaviour = Behaviour(rate=2_000)
    return fake


def command(*words: str) -> int:
    """The exit code of a command line."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0)


def test_closed_and_open_loops(server: FakeServer) -> None:
    async def both() -> tuple[list[served.Call], list[served.Call]]:
        load = served.Load(requests=6, max_tokens=20, extra={"top_k": 3})
        async with served.connect(server.url + "v1", None, 30) as client:
            model = await served.model_of(client)
            done = await served.closed(client, model, load, 3)
            return done, await served.opened(client, model, load, 100.0)

    closed, opened = asyncio.run(both())
    for calls in (closed, opened):
        assert [call.error for call in calls] == [""] * 6
        assert {call.completion_tokens for call in calls} == {20}
        assert all(len(call.chunk_ms) == 20 for call in calls)
        assert all(0 < call.ttft_ms <= call.chunk_ms[-1] <= call.e2e_ms for call in calls)
        assert all(call.timings["mbu"] == 0.91 for call in calls)
    assert [call.start_ms for call in opened] == sorted(call.start_ms for call in opened)
    assert all(call.start_ms == 0 for call in opened[:1])
    sent = [body for _, body in server.behaviour.requests]
    assert len({body["messages"][0]["content"] for body in sent[:6]}) == 6
    assert all(body["top_k"] == 3 and body["stream"] for body in sent)


def test_a_request_that_fails_is_counted(server: FakeServer) -> None:
    server.behaviour.refuse = [(429, {}, {"error": {"message": "full"}})]
    server.behaviour.break_after = 5

    async def some() -> list[served.Call]:
        async with served.connect(server.url + "v1", None, 30) as client:
            return await served.closed(client, "fake", served.Load(requests=3), 1)

    calls = asyncio.run(some())
    assert "full" in calls[0].error
    found = served.summary(calls, 1.0)
    assert found["failed"] == sum(1 for call in calls if call.error) >= 1
    assert found["completed"] == 3 - found["failed"]
    with pytest.raises(kie.KieError, match="list of models"):
        asyncio.run(served.model_of(served.connect("http://127.0.0.1:9/v1", None, 2)))


def test_serve_writes_what_dashboards_read(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("before.json", "after.json")]
    words = ("--base-url", server.url + "v1", "--requests", "4", "-c", "1,2", "-n", "40")
    for path in paths:
        picture = tmp_path / f"{path.stem}.svg"
        chosen = (*words, "--json", str(path), "--chart", str(picture), "--md")
        assert command("bench", "serve", *chosen) == 0
        ET.parse(picture)
        server.behaviour.rate = 500
    assert capsys.readouterr().out.count("| load |") == 2
    found = json.loads(paths[0].read_text())
    assert found["schema_version"] == 1
    assert found["env"]["server"]["model"] == "fake"
    total = found["summary"]
    assert total["completed"] == 8
    assert total["total_output_tokens"] == 320
    for key in ("mean_ttft_ms", "p99_itl_ms", "median_tpot_ms", "output_throughput", "windows"):
        assert key in total
    assert total["device_itl_us"]["p50"] == 500
    assert [point["label"] for point in found["points"]] == ["1", "2"]
    changes = {
        (c.label, c.name): c.worse_by for c in compare(found, json.loads(paths[1].read_text()))
    }
    assert changes["1", "decode_tokens_per_second"] > 0.5
    assert command("bench", "compare", *map(str, paths)) == 1
    assert command("bench", "compare", str(paths[0]), str(paths[0])) == 0
    assert command("bench", "serve", "--base-url", "http://127.0.0.1:9/v1", "--requests", "1") == 1


def test_pictures(engine: kie.Engine, tmp_path: Path) -> None:
    from kie.bench.measure import request

    runs = [request(engine, [1, 2, 3], "3", max_tokens=9, temperature=0, ignore_eos=True)]
    found = report.document(runs, {}, engine.info(), duration_s=1.0)
    chart.draw(found, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(kie.InvalidRequestError, match="svg"):
        chart.draw(found, tmp_path / "x.pdf")


def test_layers_are_measured_together(engine: kie.Engine, server: FakeServer) -> None:
    found = layers.measure(engine, server.url + "v1", prompt_tokens=16, max_tokens=32, runs=2)
    assert list(found) == list(layers.LAYERS)
    assert all(layer["tokens_per_second"] > 0 for layer in found.values())
    assert all(layer["ttft_ms"] > 0 for layer in found.values())
    assert "| http |" in layers.markdown(found)


def test_a_victim_beside_an_attacker(engine: kie.Engine) -> None:
    runs = mixed.measure(engine, victim_tokens=200, attacker_prompt=200, runs=1)
    labels = [run.label for run in runs]
    assert labels[:2] == ["victim alone", "victim beside"]
    assert set(labels[2:]) == {"attacker"}
    assert all(run.cached_tokens < 64 for run in runs)
    with pytest.raises(kie.ContextLengthError):
        mixed.measure(engine, victim_tokens=8, attacker_prompt=100_000, runs=1)


def test_a_soak_tells_what_grows(engine: kie.Engine) -> None:
    runs, health = soak.measure(engine, seconds=0.3, max_tokens=16)
    assert health["requests"] == len(runs) >= 2
    assert health["fixed_answers"] == 1
    assert health["rss_bytes"] > 1e6
    assert soak.slope([(0, 5), (1, 7), (2, 9)]) == pytest.approx(2)
    assert soak.slope([(1, 5)]) == 0
    assert "all the same" in soak.plain(health)
    assert "2 DIFFERENT" in soak.plain(soak.health(runs, [(0, 1)], 2))


def test_a_cold_start_has_phases() -> None:
    options = {"model": str(TINY), "device": "cpu", "threads": 1}
    (found,) = coldstart.measure(options, runs=1, cold=True)
    assert found["total_ms"] == pytest.approx(sum(found[p] for p in coldstart.PHASES[:-1]))
    assert all(found[phase] > 0 for phase in coldstart.PHASES)
    assert "open" in coldstart.plain(coldstart.summary([found]))
    with pytest.raises(kie.KieError, match="no-such"):
        coldstart.measure({"model": "./no-such"}, runs=1)
