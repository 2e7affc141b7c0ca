"""What a machine may refuse: descriptors, memory, compilers; and what callers may get wrong."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import kie
import pytest
from conftest import ROOT, TINY
from kie import _kie, machine

sys.path.insert(0, str(ROOT / "tests" / "attack"))

from generators import limits


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`$KIE` stands for the command, `$TINY` for the tiny model."""
    return subprocess.run(
        ["/bin/bash", "-c", line.replace("$KIE", f"{sys.executable} -m kie")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TINY": str(TINY)} | environment,
    )


def test_closed_streams_are_told_not_tripped_over() -> None:
    done = shell("$KIE run x -m $TINY -n 2 >&-")
    assert (done.returncode, done.stdout) == (1, "")
    assert "standard output is closed" in done.stderr
    assert "Traceback" not in done.stderr
    errors = shell("$KIE run x -m $TINY -n 2 --top-p 7 2>&-")
    assert (errors.returncode, errors.stdout) == (1, "")
    unasked = shell("$KIE chat -m $TINY -n 2 <&-")
    assert (unasked.returncode, unasked.stderr) == (0, "")
    both = shell("$KIE run - -m $TINY -n 2 <&- >&- 2>&-")
    assert both.returncode == 1
    full = shell("$KIE run x -m $TINY -n 2 -q >/dev/full")
    assert full.returncode == 1
    assert full.stderr.startswith("error: OSError: [Errno 28]")
    assert "Exception ignored" not in full.stderr


def test_a_line_that_is_too_long_is_no_turn() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kie", "chat", "-m", str(TINY), "-n", "3", "-t", "0"],
        input=f"abc\n{'word ' * 4000}\n/reset\nabc\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert "exceed the context" in done.stderr
    first, second = done.stdout[: len(done.stdout) // 2], done.stdout[len(done.stdout) // 2 :]
    assert first == second != ""


def test_doctor_fits_the_limits_it_reports() -> None:
    done = shell("ulimit -v 2000000; $KIE doctor --json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["memory_bytes"] <= 2_000_000 * 1024
    assert found["memory_free_bytes"] < found["memory_bytes"]
    small = shell("ulimit -v 600000; $KIE doctor")
    assert small.returncode == 0, small.stderr


def test_doctor_says_what_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    with kie.Engine(TINY, device="cpu") as engine:
        threads = engine.info()["threads"]
    found = machine.report(measure=False)
    assert f"{threads} thread" in found.will_use
    assert _kie.host()[4] == threads
    for impostor in ("/bin/true", "/bin/cat", "/bin/false", "/nonexistent"):
        monkeypatch.setenv("CXX", impostor)
        assert machine.report(measure=False).compiler is None
        with pytest.raises(kie.NoDeviceError, match="CXX"):
            kie.Engine(TINY, device="sim")
    monkeypatch.delenv("CXX")
    assert machine.report(measure=False).compiler is not None


@pytest.mark.parametrize("real", [True, False], ids=["group", "told"])
def test_a_quota_of_cpu_time_counts(tmp_path: Path, real: bool) -> None:
    """Half a core: of a control group where one can be made here, and of files that say so."""
    case = {"kind": "cpu", "quota": 0.5, "room": 0}
    script = """
import kie, sys
from kie import machine
with kie.Engine(sys.argv[1], device="cpu") as engine:
    print(engine.info()["threads"], machine.report(measure=False).will_use)
"""
    files = {"cpu.max": "50000 100000"}
    with (
        limits.group(case, tmp_path) if real else nullcontext(limits.told(tmp_path, files)) as set_
    ):
        if set_ is None:
            pytest.skip("neither control groups nor mounts may be made here")
        done = subprocess.run(
            [*set_, sys.executable, "-c", script, str(TINY)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stdout.startswith("1 cpu ("), (done.stdout, done.stderr)
    assert ", 1 thread)" in done.stdout


def test_little_address_space_is_told() -> None:
    script = """
import os, resource, sys
import kie, numpy
taken = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
for megabytes in map(int, sys.argv[1:]):
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_AS, (taken + (megabytes << 20),) * 2)
        try:
            kie.Engine(device="cpu", threads=1, max_batch=1, max_seq_len=64)
            print("opened", flush=True)
        except kie.KieError as error:
            print(error.code, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, f"{megabytes} MB"
"""
    rooms = ("1", "12", "20", "30", "45", "70", "200")
    done = subprocess.run(
        [sys.executable, "-c", script, *rooms],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"RUST_BACKTRACE": "0"},
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split()
    assert said[-1] == "opened"
    assert said.count("out_of_memory") >= 2, said


@pytest.mark.parametrize("work", ["open", "quantize"])
def test_a_full_disk_holds_no_cache_and_no_half_of_a_model(tmp_path: Path, work: str) -> None:
    case = {"kind": "disk", "room": 4096, "work": work, "model": "tiny", "threads": 1}
    if not limits.run(case, tmp_path):
        pytest.skip("nothing may be mounted here")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"ignore_eos": 1}, "ignore_eos must be bool, got int"),
        ({"stop": 5}, "stop must be str or a sequence of str, got int"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a sequence of token ids, got int"),
        ({"logit_bias": 5}, "logit_bias must map ids to numbers, got int"),
        ({"timeout": "1"}, "timeout must be float or None, got str"),
    ],
)
def test_a_wrong_type_names_its_argument(
    engine: kie.Engine, keywords: dict[str, object], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        engine.generate("a", **keywords)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"threads": 0}, "threads must be 1 to 1024, got 0$"),
        ({"threads": 5000}, "threads must be 1 to 1024, got 5000$"),
        ({"kv_bytes": 1}, "kv_bytes must be at least [0-9]+, .*max_seq_len 512, got 1$"),
    ],
)
def test_a_wrong_option_says_what_would_do(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(kie.InvalidRequestError) as caught:
        kie.Engine(TINY, device="cpu", **keywords)  # type: ignore[arg-type]
    assert re.search(message, caught.value.message), caught.value.message
    assert "lower" not in caught.value.hint


def copied(folder: Path, **changes: Callable[[bytes], bytes]) -> Path:
    """The tiny model by links, but for changed files (`_` stands for `.`)."""
    for file in TINY.iterdir():
        name = file.name.replace(".", "_")
        if name in changes:
            (folder / file.name).write_bytes(changes[name](file.read_bytes()))
        else:
            (folder / file.name).symlink_to(file)
    return folder


def edited(**values: object) -> Callable[[bytes], bytes]:
    return lambda text: json.dumps(json.loads(text) | values).encode()


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("generation_config_json", {"top_p": 2.0}, ("generation_config.json", "top_p", "2.0")),
        (
            "generation_config_json",
            {"repetition_penalty": 0},
            ("generation_config.json", "repetition_penalty"),
        ),
        ("generation_config_json", {"temperature": 1e300}, ("generation_config", "temperature")),
        ("config_json", {"rope_theta": 1e-30}, ("config.json", "rope_theta")),
    ],
)
def test_a_bad_number_is_blamed_on_its_file(
    tmp_path: Path, file: str, values: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(kie.KieError) as caught:
        kie.Engine(copied(tmp_path, **{file: edited(**values)}), device="cpu")
    assert all(word in caught.value.message for word in words), caught.value.message
    assert isinstance(caught.value, (kie.LoadError, kie.UnsupportedModelError))


@pytest.mark.parametrize(
    "name",
    ["model.safetensors.index.json", "generation_config.json", "chat_template.jinja"],
)
def test_a_link_that_leads_nowhere_is_not_absent(tmp_path: Path, name: str) -> None:
    folder = copied(tmp_path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("nowhere")
    with pytest.raises(kie.LoadError, match=name):
        kie.Engine(folder, device="cpu")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    folder = copied(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(kie.LoadError, match="not a regular file"):
        kie.Engine(folder, device="cpu")
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(kie.LoadError, match="not a regular file"):
        kie.Engine(folder, device="cpu")


def test_a_topology_is_a_regular_file(tmp_path: Path) -> None:
    from kie.engine import plan_ahead

    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(kie.InvalidRequestError, match="not a regular file"):
            plan_ahead(TINY, topology=file)


def test_a_stream_has_one_reader(engine: kie.Engine) -> None:
    async def both() -> list[object]:
        stream = engine.stream("abc", max_tokens=200, ignore_eos=True)

        async def read() -> int:
            return len([token async for token in stream])

        return list(await asyncio.gather(read(), read(), return_exceptions=True))

    found = asyncio.run(asyncio.wait_for(both(), 60))
    assert any(isinstance(one, kie.InvalidRequestError) for one in found)


def test_a_stream_may_move_to_another_loop_but_not_be_in_two(engine: kie.Engine) -> None:
    stream = engine.stream("abc", max_tokens=300, ignore_eos=True)

    async def some(count: int) -> int:
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == count:
                break
        return seen

    assert asyncio.run(some(3)) == 3
    assert asyncio.run(asyncio.wait_for(some(1000), 60)) == 297


class Silent:
    """A core that never has a token."""

    finished = False
    seed = 0

    def __init__(self) -> None:
        self.fd = os.eventfd(0)

    def try_next(self) -> None:
        return None

    def poll_fd(self) -> int:
        return self.fd

    def cancel(self) -> None:
        self.finished = True


def test_a_stream_is_not_read_in_two_loops() -> None:
    core = Silent()
    stream = kie.Stream(core)  # type: ignore[arg-type]
    waits = threading.Event()
    ends = threading.Event()

    async def wait() -> None:
        task = asyncio.ensure_future(anext(stream))
        while stream._waker is None:
            await asyncio.sleep(0)
        waits.set()
        while not ends.is_set():
            await asyncio.sleep(0.005)
        task.cancel()

    async def late() -> None:
        await anext(stream)

    thread = threading.Thread(target=lambda: asyncio.run(wait()))
    thread.start()
    try:
        assert waits.wait(10)
        with pytest.raises(kie.InvalidRequestError, match="another event loop"):
            asyncio.run(asyncio.wait_for(late(), 30))
    finally:
        ends.set()
        thread.join(30)
        os.close(core.fd)
    assert not thread.is_alive()


def test_what_json_cannot_say_is_refused_in_the_name_of_its_argument(engine: kie.Engine) -> None:
    circle: list[object] = []
    circle.append(circle)
    deep: object = "a"
    for _ in range(100_000):
        deep = {"a": deep}
    for odd in (circle, deep, float("nan")):
        asked: Any = [{"role": "user", "content": odd}]
        with pytest.raises(kie.InvalidRequestError, match=r"^messages: "):
            engine.generate(messages=asked)
        with pytest.raises(kie.InvalidRequestError, match=r"^chat_template_kwargs: "):
            engine.generate(
                messages=[{"role": "user", "content": "a"}], chat_template_kwargs={"a": odd}
            )
    with pytest.raises(TypeError, match="prompts must be"):
        engine.generate_many("abc")
    with pytest.raises(TypeError, match="prompt must be"):
        engine.generate_many([5])  # type: ignore[list-item]


def test_a_gguf_file_is_told_by_its_own_kind(tmp_path: Path) -> None:
    (tmp_path / "short.gguf").write_bytes(b"GGUF")
    with pytest.raises(kie.LoadError, match=r"wanted a GGUF file, got less than 8 bytes"):
        kie.Engine(tmp_path / "short.gguf", device="cpu")


def test_doctor_bears_that_there_are_no_threads() -> None:
    script = """
import os, resource
from kie import _kie, machine
# What Python has not imported by now it cannot import below the limit.
machine.report(measure=False)
resource.setrlimit(resource.RLIMIT_DATA, (1 << 20, 1 << 20))
print(machine.report(measure=False).compiler)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"RUST_BACKTRACE": "0"},
    )
    assert "panicked" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
