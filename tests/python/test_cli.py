"""The command line as a process: every verb, exit codes, pipes, Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kie
import pytest
from conftest import DATA, ROOT, TINY
from kie import cli
from kie.cli.demo import PROMPTS
from kie.cli.models import EXAMPLES
from kie.engine import plan_ahead

FIBONACCI = "def fibonacci(n):"


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """`kie ...` with captured output."""
    command = [sys.executable, "-m", "kie", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        **options,  # type: ignore[call-overload]
    )


def test_run_streams_what_python_says(demo: kie.Engine) -> None:
    wanted = demo.generate(FIBONACCI, temperature=0, max_tokens=30).text
    for words, given in (((FIBONACCI,), None), (("-",), FIBONACCI), ((), FIBONACCI)):
        done = run("run", *words, "-t", "0", "-n", "30", input=given)
        assert done.returncode == 0
        assert done.stdout.rstrip("\n") == wanted.rstrip("\n")
        assert "tokens" in done.stderr
        assert "/s" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    quiet = run("run", FIBONACCI, "-n", "3", "-q")
    assert quiet.stderr == ""


def test_run_takes_sampling_options() -> None:
    words = ("run", "abc", "-m", str(TINY), "-n", "20", "-t", "1.5", "--seed", "4", "--ignore-eos")
    first, again = run(*words), run(*words)
    assert first.returncode == 0
    assert first.stdout == again.stdout
    assert "seed 4" in first.stderr


def test_run_prints_a_completion_and_takes_messages(demo: kie.Engine) -> None:
    words = ("run", "hi", "--chat", "--json", "-t", "0", "-n", "5", "--logprobs", "1", "-q")
    done = json.loads(run(*words, "--logit-bias", "7=-3", "--min-p", "0").stdout)
    asked = {"max_tokens": 5, "temperature": 0, "logit_bias": {7: -3.0}}
    wanted = demo.generate(messages=[{"role": "user", "content": "hi"}], **asked)
    assert done["token_ids"] == list(wanted.token_ids)
    assert len(done["logprobs"][0]["top_logprobs"]) == 1
    assert run("run", "x", "--logit-bias", "nonsense").returncode == 2


def test_models_lists_what_runs() -> None:
    found = json.loads(run("models", "--json").stdout)
    assert "Qwen/Qwen3-0.6B" in found["architectures"]["qwen3"]
    printed = run("models").stdout
    assert set(EXAMPLES) <= set(found["architectures"]), "an example of what does not run"
    assert all(f"\n{name}" in f"\n{printed}" for name in found["architectures"])
    unknown = run("info", str(DATA / "llama"), "--max-seq-len", "1")
    assert "hint: `kie info --help` lists what there is to say" in unknown.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_know_verbs_and_options(shell: str) -> None:
    script = run("completion", shell).stdout
    for word in ("serve", "compare", "max-seq-len", "min-p"):
        assert word in script
    if shell == "bash":
        asks = "COMP_WORDS=(kie run --min); COMP_CWORD=2; _kie; echo ${COMPREPLY[*]}"
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{asks}"], capture_output=True, text=True, timeout=60
        )
        assert done.stdout.split() == ["--min-p", "--min-tokens"]


def test_demo_answers_a_prompt_of_its_list(demo: kie.Engine) -> None:
    for words, prompt in (((), PROMPTS[0]), (("2",), PROMPTS[1])):
        done = run("demo", *words, input="")
        told = [{"role": "user", "content": prompt}]
        assert done.stdout == demo.generate(messages=told, temperature=0).text + "\n"
        assert done.stderr.startswith(prompt)
    for wrong in ("0", "9", "x", "²"):
        assert f"wanted 1 to {len(PROMPTS)}" in run("demo", wrong).stderr


def test_chat_answers_each_line() -> None:
    done = run("chat", "-n", "4", "-t", "0", input="def f(x):\n/undo\ndef f(x):\n\n/exit\nmore\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    once = run("chat", "-n", "4", "-t", "0", input="def f(x):\n/save /nowhere/kept.json\n")
    assert done.stdout == once.stdout * 2
    assert "error: /nowhere/kept.json: No such file or directory\nhint: check" in once.stderr
    assert once.returncode == 1


def test_info_names_the_model() -> None:
    done = run("info", str(TINY), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    plain = run("info", str(TINY))
    assert plain.returncode == 0
    assert "weight bytes            " in plain.stdout
    assert re.search(r"^opened in .* ms$", plain.stdout, re.MULTILINE)
    assert "passed over" not in plain.stdout or list(Path("/dev").glob("nvidia0"))
    assert max(map(len, plain.stdout.splitlines())) <= 120


def test_doctor_in_both_forms() -> None:
    done = run("doctor", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["kie"] == kie.__version__
    assert "will use" in run("doctor").stdout


def test_doctor_says_what_a_model_would_reach() -> None:
    done = run("doctor", "llama-3.1-8b")
    assert done.returncode == 0
    assert re.search(
        r"^expect +llama-3.1-8b on .*: (about .* tokens/s|.* do not fit)", done.stdout, re.M
    )
    as_json = json.loads(run("doctor", "llama-3.1-8b", "--json").stdout)
    assert as_json["expected"][0]["model"] == "llama-3.1-8b"
    wrong = run("doctor", "no-such-model")
    assert wrong.returncode == 1
    assert "config.json" in wrong.stderr
    assert not wrong.stdout


def test_doctor_says_what_is_linked(tmp_path: Path) -> None:
    found = json.loads(run("doctor", "--json").stdout)
    printed = run("doctor").stdout
    file = tmp_path / "topology.json"
    done = run("doctor", "--topology", str(file))
    if found["gpus"]:
        assert found["topology"] in done.stdout
        assert "\ntopology\n" in printed
        plan = run("info", str(TINY), "--plan", "--topology", str(file))
        assert found["topology"] in plan.stdout
        return
    assert found["topology"] is None
    assert [line for line in printed.splitlines() if line.startswith("topology")] == [
        "topology  no GPUs, nothing to link"
    ]
    assert done.returncode == 1
    assert "no GPU here" in done.stderr
    assert not file.exists()


TOPOLOGIES = ROOT / "crates" / "kie-kccl" / "topologies"


@pytest.mark.parametrize(
    ("machine", "model", "ranks", "told"),
    [
        ("h200x4", "laneformer_d2", 4, "rank 3: lanes 3 of 4; weights"),
        ("mi300xx8", "own_laneformer_mixed", 8, "rank 7: lanes 7 of 8; weights"),
        ("pcie4", "llama", 4, "rank 1: heads 2 of 6, kv heads 0 of 2"),
    ],
)
def test_plans_for_recorded_machines(machine: str, model: str, ranks: int, told: str) -> None:
    file = str(TOPOLOGIES / f"{machine}.json")
    words = ("info", str(DATA / model), "--plan", "--topology", file)
    done = run(*words)
    assert done.returncode == 0, done.stderr
    golden = (TOPOLOGIES / f"{machine}.plan").read_text()
    plan = done.stdout
    assert plan.startswith("device    ")
    assert golden not in plan
    assert run(*words, "-v").stdout.endswith(golden)
    assert told in plan
    assert plan.count("\n  rank ") == ranks
    assert ("placed    8 chiplets" in plan) == (machine == "mi300xx8")
    found = json.loads(run(*words, "--json").stdout)
    assert found["algorithms"] == golden
    assert [rank["name"] for rank in found["ranks"]] == [
        gpu["name"] for gpu in found["topology"]["gpus"]
    ]
    assert all(rank["kv_bytes"] > 0 for rank in found["ranks"])


def test_a_plan_names_some_of_a_recorded_machine() -> None:
    file = str(TOPOLOGIES / "pcie4.json")
    words = ("info", str(TINY), "--plan", "--topology", file)
    done = run(*words, "--device", "cuda:1,3", "-v")
    assert done.returncode == 0, done.stderr
    assert "SOCK 31" in done.stdout
    assert "device    cuda:1,3 (2 x RTX PRO 6000)" in done.stdout
    alone = run(*words, "--device", "cuda:2", "-v")
    assert "one machine: no messages" in alone.stdout
    assert "all-reduce" not in alone.stdout
    here = run("info", str(TINY), "--plan", "--device", "cpu", "-v")
    assert here.stdout.startswith("device    cpu")
    assert here.stdout.endswith("no topology: the CPU is one machine\n")
    simulated = run("info", str(TINY), "--plan", "-v", "--device", f"sim:topology={file},ranks=2")
    assert "PCIE 63" in simulated.stdout
    assert "188 blocks, sim-warp32" in simulated.stdout


def test_a_verbose_plan_prints_what_kernels_are_given() -> None:
    words = ("info", str(DATA / "llama"), "--plan", "-v", "--device", "cuda:0")
    done = run(*words, "--topology", str(TOPOLOGIES / "h200x4.json"))
    assert done.returncode == 0, done.stderr
    layers = json.loads((DATA / "llama" / "config.json").read_text())["num_hidden_layers"]
    lines = done.stdout.splitlines()
    assert len(re.findall(r"^ +\d+  pages$", done.stdout, re.M)) == layers
    stages = re.findall(r"  fixed +(\d+) +(\d+) x +(\d+)  ", done.stdout)
    offset = 0
    for at, count, size in stages:
        assert int(at) == offset
        offset += int(count) * int(size)
    assert len(stages) >= 4 * layers + 1
    segments = next(line for line in lines if line.startswith("segments"))
    assert segments.endswith(f"{offset} bytes of weights a block")
    for part in ("class 0 ", "rows ", "layers ", "kernel    1 column(s)", "kernel    8 column(s)"):
        assert any(line.startswith(part) for line in lines), part
    assert "  exchange, in words of 8 bytes" in lines
    assert "  shared memory, offsets in bytes" in lines
    here = run("info", str(DATA / "llama"), "--plan", "-v", "--device", "cpu")
    assert "segments" not in here.stdout


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "No such file"),
        ("", "EOF while parsing"),
        ('{"version": 1, "name": "x", "gpus": [', "EOF while parsing"),
        ('{"version": 2}', "version: wanted 1, got 2"),
        ('{"version": 1, "name": "x", "gpus": [], "links": []}', "gpus: wanted 1 or more"),
        (('"b": 1', '"b": 9'), "link 0-9: GPU 9: wanted 0 to 3"),
        (('"multiprocessors": 188', '"multiprocessors": 0'), "GPU 0: multiprocessors: wanted"),
        (('"arch": "sm_120"', '"arch": "z80"'), "GPU 0: arch: wanted sm_.. or gfx.."),
    ],
    ids=str,
)
def test_broken_topologies_are_errors(
    tmp_path: Path, text: str | tuple[str, str] | None, wanted: str
) -> None:
    file = tmp_path / "machine.json"
    if isinstance(text, tuple):
        text = (TOPOLOGIES / "pcie4.json").read_text().replace(*text, 1)
    if text is not None:
        file.write_text(text)
    with pytest.raises(kie.InvalidRequestError, match=re.escape(wanted)) as caught:
        plan_ahead(TINY, topology=file)
    assert caught.value.code == "topology"
    assert caught.value.context["file"] == str(file)
    assert "kie doctor --topology" in caught.value.hint
    done = run("info", str(TINY), "--plan", "--topology", str(file))
    assert done.returncode == 1
    assert done.stdout == ""
    assert wanted in done.stderr.splitlines()[0]


def test_nothing_runs_on_a_recorded_machine() -> None:
    file = str(TOPOLOGIES / "h200x4.json")
    done = run("info", str(TINY), "--topology", file)
    assert done.returncode == 1
    assert "hint: add --plan" in done.stderr
    done = run("info", str(TINY), "--plan", "--topology", file, "--device", "cuda:4")
    assert "device cuda:4: wanted one of cuda:0, cuda:1" in done.stderr


def test_info_prints_the_cut_for_a_simulated_gpu() -> None:
    done = run("info", str(TINY), "--device", "sim:blocks=8")
    assert done.returncode == 0, done.stderr
    assert "partition 8 blocks" in done.stdout
    assert "head:" in done.stdout


def test_compile_fills_the_cache(tmp_path: Path) -> None:
    environment = os.environ | {"KIE_CACHE": str(tmp_path)}
    done = run("compile", str(TINY), "--device", "sim:blocks=8", env=environment)
    assert done.returncode == 0, done.stderr
    assert "partition 8 blocks" in done.stdout
    assert "compiled in" in done.stderr
    kept = sorted((tmp_path / "sim").glob("*.bin"))
    assert kept
    run("run", "x", "-m", str(TINY), "-n", "1", "--device", "sim:blocks=8", env=environment)
    assert sorted((tmp_path / "sim").glob("*.bin")) == kept, "an engine compiles nothing more"
    refused = run("compile", str(TINY), "--device", "cpu")
    assert refused.returncode == 1
    assert "nothing is compiled" in refused.stderr


def test_random_weights_want_a_known_shape_and_no_model() -> None:
    done = run("bench", "latency", "--random-weights", "llama-9000")
    assert done.returncode == 1
    assert "no shape 'llama-9000'" in done.stderr
    assert "llama-3.2-1b" in done.stderr
    done = run("bench", "latency", str(TINY), "--random-weights", "llama-3.2-1b")
    assert done.returncode == 1
    assert "both a model" in done.stderr
    assert "pass one of them" in done.stderr


def test_tokenize_agrees_with_python(demo: kie.Engine) -> None:
    done = run("tokenize", FIBONACCI, "--json")
    assert json.loads(done.stdout) == demo.tokenize(FIBONACCI)
    rows = run("tokenize", "-", "--no-special", input=FIBONACCI).stdout.splitlines()
    assert [int(row.split()[0]) for row in rows] == demo.tokenize(FIBONACCI, add_special=False)


def test_pull_without_a_way_to_the_hub_is_an_error() -> None:
    done = run("pull", "some-org/some-model", env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: some-org/some-model")
    assert run("pull", "not an id").returncode == 1


def test_bench_writes_reports_and_compares_them(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    size = ("-n", "8", "--runs", "2", "--warmups", "1")
    drawn = ("--png", str(tmp_path / "one.png"))
    done = run("bench", "latency", str(TINY), "-p", "16", *size, "--json", str(one), *drawn)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert "p50 us" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    done = run("bench", "sweep", str(TINY), "-p", "16,40", *size, "--json", str(two), "--md")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("|\n") == 4
    words = ("-p", "16", "-b", "1,3", *size, "--json", str(tmp_path / "many.json"))
    assert run("bench", "sweep", str(TINY), *words).returncode == 0
    many = json.loads((tmp_path / "many.json").read_text())
    assert [(point["label"], point["completed"]) for point in many["points"]] == [
        ("16", 2),
        ("16 x3", 6),
    ]
    report = json.loads(two.read_text())
    assert set(report) >= {"schema_version", "env", "config", "runs", "summary"}
    assert len(report["runs"]) == 4
    assert report["summary"]["total_output_tokens"] == 32
    assert report["summary"]["device_itl_us"]["p50"] > 0
    assert run("bench", "compare", str(one), str(two), "--threshold", "1e9").returncode == 0
    for run_record in report["points"]:
        run_record["decode_tokens_per_second"] /= 2
    worse = tmp_path / "worse.json"
    worse.write_text(json.dumps(report))
    done = run("bench", "compare", str(two), str(worse))
    assert done.returncode == 1
    assert "WORSE" in done.stdout
    printed = run("bench", "latency", str(TINY), "-p", "16", *size, "--json", "-")
    assert json.loads(printed.stdout)["schema_version"] == 1
    table = run("bench", "latency", str(TINY), "-p", "16", *size, "--csv")
    assert len(table.stdout.splitlines()) == 2


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("run", "a", "--frobnicate"),
        ("run", "a", "-n", "many"),
        ("bench", "nonsense"),
        ("bench", "sweep", "-p", "one,two"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_2(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "usage:" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("tokenize",),
        ("run", "a", "-m", "/nowhere"),
        ("run", "a", "--device", "cuda:9"),
        ("run", "a", "-t", "-1"),
        ("run", "x " * 5000),
        ("info", "/nowhere"),
        ("tokenize", "a", "-m", "/nowhere"),
        ("bench", "compare", "/nowhere", "/nowhere"),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_errors_are_1_with_cause_and_remedy(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.returncode == 1
    assert done.stdout == ""
    cause, remedy = done.stderr.splitlines()
    assert cause.startswith("error: ")
    assert len(cause) > 12
    assert remedy.startswith("hint: ")
    assert "Traceback" in run(*words, "-v").stderr


def of_broken_files(tmp_path: Path) -> list[tuple[tuple[str, ...], str]]:
    """Commands that read a file, each with files that are none."""
    contents = {"deep": b"[" * 200_000, "list": b"[1]", "latin": b'{"a": "\xe9"}'}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    text = ["/dev/zero", str(tmp_path / "latin"), str(tmp_path / "absent")]
    objects = [*text, str(tmp_path / "deep"), str(tmp_path / "list")]
    out = str(tmp_path / "out")
    return [
        *((("run", "a", "--json-schema", file), file) for file in text),
        *((("quantize", str(TINY), out, "--to", "fp8", "--eval", file), file) for file in text),
        *((("bench", "compare", file, file), file) for file in objects),
        *((("bench", "roofline", file), file) for file in objects),
        *((("bench", "roofline", "--topology", file), file) for file in objects),
    ]


def test_files_that_are_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, file in of_broken_files(tmp_path):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 1, words
        said = capsys.readouterr().err
        assert said.startswith("error: "), words
        assert file in said, words
    assert not (tmp_path / "out").exists()


def numeric_options() -> list[tuple[tuple[str, ...], str]]:
    """(verb, option) of every option that takes a number or is checked as it is read."""

    def children(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
        actions = parser._actions
        found = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
        return dict(found[0].choices) if found else {}

    def walk(words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        parser = cli.parser(words)
        for word in words:
            parser = children(parser)[word]
        for action in parser._actions:
            if action.type not in (None, Path) and action.option_strings:
                yield words, action.option_strings[-1]
        for word in children(parser):
            yield from walk((*words, word))

    # A process of its own opens the engine of `bench coldstart`.
    found = [found for verb in children(cli.parser([])) for found in walk((verb,))]
    return [(words, option) for words, option in found if words != ("bench", "coldstart")]


NUMERIC = numeric_options()
# What comes before the options: no verb gets as far as to open a model, or to listen.
NEEDED = {
    "run": ("a", "-m", "/nowhere"),
    "chat": ("-m", "/nowhere"),
    "serve": ("/nowhere", "--port", "0"),
    "bench compare": ("a", "b"),
}


@pytest.mark.parametrize(
    ("words", "option"), NUMERIC, ids=[" ".join((*words, option)) for words, option in NUMERIC]
)
def test_an_impossible_number_is_told_in_words(
    words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = NEEDED.get(" ".join(words), ("/nowhere",))
    heard = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for value in ("-1", "nan", "9" * 30):
        with pytest.raises(SystemExit) as ended:
            cli.main([*words, *needed, f"{option}={value}"])
        told = capsys.readouterr().err
        assert ended.value.code in (1, 2), value
        assert "rror: " in told, value
        assert not re.search(r"^error: \w+(Error|Exception): ", told), told
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == heard


def test_a_server_that_could_take_nothing_is_refused() -> None:
    for option in ("--max-body-mb", "--header-timeout-s", "--body-timeout-s"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["serve", "/nowhere", "--port", "0", f"{option}=0"])


def test_a_port_in_use_is_told_with_a_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 1
    cause, remedy = done.stderr.splitlines()
    assert "in use" in cause
    assert "OSError" not in cause
    assert "--port" in remedy


def test_help_and_version_are_0() -> None:
    version = run("--version").stdout
    assert version.startswith(f"kie {kie.__version__} (")
    assert "devices: cpu" in version
    alone = run()
    assert (alone.returncode, alone.stdout) == (0, run("--help").stdout)
    for verb in ("run", "chat", "info", "compile", "doctor", "tokenize", "pull", "bench"):
        done = run(verb, "--help")
        assert done.returncode == 0
        assert "usage:" in done.stdout
        assert verb in run("--help").stdout


def test_junk_on_standard_input_is_an_error() -> None:
    command = [sys.executable, "-m", "kie", "run", "-"]
    done = subprocess.run(command, input=b"\xff\xfe", capture_output=True, timeout=60)
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m kie run '{FIBONACCI}' --ignore-eos -q | head -c 5"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=60
    )
    assert len(done.stdout) == 5
    assert done.stderr == ""
    assert done.returncode == 0


def test_ctrl_c_ends_quietly() -> None:
    command = [sys.executable, "-m", "kie", "run", FIBONACCI, "--ignore-eos"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.strip() == ""
