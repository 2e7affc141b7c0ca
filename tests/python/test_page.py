"""The playground in a browser, against a server that does what each test wants."""

from __future__ import annotations

import ast
import html
import io
import keyword
import re
import shutil
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kie
import pytest
from fake_server import ANSWER, PAGE, Behaviour, FakeServer
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = "/usr/bin/chromium"
TESTIDS = (
    "prompt run cancel output rate ttft max-tokens temperature seed mode theme copy-curl "
    "copy-python examples"
).split()
COUNT_SHIFTS = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const { hadRecentInput, sources } of list.getEntries()) {
    if (!hadRecentInput) window.shifts.push(...sources.map(({ node }) => node?.id || `${node}`));
  }
}).observe({ type: "layout-shift", buffered: true });
"""
UNNAMED = """[...document.querySelectorAll("button, input, select, textarea, canvas, [role]")]
  .filter((one) => !one.ariaLabel && !one.getAttribute("aria-labelledby") && !one.labels?.length
    && !one.textContent.trim() && !["status", "alert"].includes(one.getAttribute("role")))
  .map((one) => one.outerHTML)"""
COLOURED = """async ([text, sizes, what]) => {
  const { Highlighter } = await import("./highlight.js");
  const parts = [];
  const highlighter = new Highlighter((kind, part) => {
    if (parts.length && parts.at(-1)[0] === kind) parts.at(-1)[1] += part;
    else parts.push([kind, part]);
  }, what);
  for (let at = 0, n = 0; at < text.length; n += 1) {
    const size = sizes[n % sizes.length];
    highlighter.write(text.slice(at, at + size));
    at += size;
  }
  highlighter.write("", true);
  return parts;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium; nothing is downloaded."""
    if shutil.which(CHROMIUM) is None:
        pytest.fail(f"{CHROMIUM} is missing: apt-get install --no-install-recommends chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def served() -> Iterator[FakeServer]:
    """One server for all tests; each sets its own behaviour."""
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def server(served: FakeServer) -> FakeServer:
    """The server, as it behaves when nothing is wrong."""
    served.behaviour = Behaviour()
    return served


@pytest.fixture
def page(browser: Browser, server: FakeServer) -> Iterator[Page]:
    """The page, opened; at the end nothing may have been complained about or moved by itself."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 800},
        permissions=["clipboard-read", "clipboard-write"],
    )
    context.set_default_timeout(10_000)
    context.add_init_script(COUNT_SHIFTS)
    opened = context.new_page()
    said: list[str] = []
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("console", lambda line: said.append(line.text) if line.type == "error" else None)
    opened.goto(server.url)
    yield opened
    # What a test refuses on purpose the browser logs as a failed resource.
    said = [line for line in said if "Failed to load resource" not in line]
    assert said == []
    assert opened.evaluate("window.shifts") == []
    context.close()


def finished(page: Page) -> None:
    """Waits until nothing runs."""
    expect(page.get_by_test_id("run")).to_be_enabled()


def run(page: Page, **fields: str) -> str:
    """Fills in fields by test id, runs, and returns the answer."""
    for name, value in fields.items():
        page.get_by_test_id(name.replace("_", "-")).fill(value)
    page.get_by_test_id("run").click()
    finished(page)
    return page.get_by_test_id("output").text_content() or ""


def clipboard(page: Page, button: str) -> str:
    """What a copy button gives."""
    page.get_by_test_id(button).click()
    expect(page.get_by_test_id(button)).to_have_text("Copied")
    return str(page.evaluate("navigator.clipboard.readText()"))


def test_an_answer_is_shown_and_measured(page: Page, server: FakeServer) -> None:
    for name in TESTIDS:
        expect(page.get_by_test_id(name)).to_be_visible()
    text = run(page, prompt="Write a function.", max_tokens="600", temperature="0.5", seed="3")
    assert text == (ANSWER * 40)[: 600 * 4]
    assert page.get_by_test_id("output").inner_text()[:100] == ANSWER[:100]
    path, body = server.behaviour.requests[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Write a function."}]
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (600, 0.5, 3)
    assert body["model"] == "fake"
    assert float(page.get_by_test_id("rate").inner_text()) > 0
    assert page.get_by_test_id("ttft").inner_text().endswith("s")
    assert page.locator("#mbu").inner_text() == "91 %"
    assert page.locator("#prompt-tokens").inner_text() == "24, 16 cached"
    assert page.locator("#output-tokens").inner_text() == "600, length"
    assert "p99 0.24 ms" in (page.locator("#chart").get_attribute("aria-label") or "")
    expect(page.locator("#spoken")).to_contain_text("Done: 600 tokens")
    assert page.locator("#output .keyword").first.inner_text() == "def"


def test_the_replay_keeps_its_pace(page: Page) -> None:
    """Slower than the answer, yet it comes to the same text."""
    text = run(page, max_tokens="2000")
    behind = page.locator("#replay").text_content() or ""
    assert text.startswith(behind)
    assert len(behind) < len(text), "20 s of replay were over before the answer"
    text = run(page, max_tokens="30")
    expect(page.locator("#slow-note")).to_contain_text("30 of 30")
    expect(page.locator("#replay")).to_have_text(text, use_inner_text=False)
    assert page.locator("#replay").text_content() == text


def test_keys_and_modes(page: Page, server: FakeServer) -> None:
    server.behaviour.rate = 100
    page.get_by_test_id("mode").select_option("prompt")
    page.get_by_test_id("max-tokens").fill("100000")
    page.get_by_test_id("prompt").fill("def quicksort(")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_test_id("cancel")).to_be_enabled()
    expect(page.get_by_test_id("output")).to_contain_text("def sum")
    page.keyboard.press("Escape")
    finished(page)
    assert server.behaviour.gone.wait(5)
    text = page.get_by_test_id("output").text_content()
    page.wait_for_timeout(100)
    assert page.get_by_test_id("output").text_content() == text
    assert "cancelled" in page.locator("#output-tokens").inner_text()
    assert server.behaviour.requests[0][0] == "/v1/completions"
    assert server.behaviour.requests[0][1]["prompt"] == "def quicksort("
    server.behaviour.rate = 5_000
    page.get_by_test_id("max-tokens").fill("20")
    page.keyboard.press("Meta+Enter")
    finished(page)
    expect(page.get_by_test_id("cancel")).to_be_disabled()
    assert len(server.behaviour.requests) == 2


def test_a_follow_up_knows_what_was_said(page: Page, server: FakeServer) -> None:
    first = run(page, prompt="First.", max_tokens="30")
    page.locator("#follow-up").fill("Second.")
    page.keyboard.press("Enter")
    finished(page)
    assert server.behaviour.requests[1][1]["messages"] == [
        {"role": "user", "content": "First."},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Second."},
    ]
    assert page.locator("#history .said").all_inner_texts() == ["First.", "Second."]
    assert page.locator("#history .code").text_content() == first
    run(page)
    assert len(server.behaviour.requests[2][1]["messages"]) == 1
    assert page.locator("#history").inner_text() == ""


def test_examples_run(page: Page, server: FakeServer) -> None:
    buttons = page.get_by_test_id("examples").get_by_role("button")
    for n in range(buttons.count()):
        buttons.nth(n).click()
        finished(page)
    modes = [path for path, _ in server.behaviour.requests]
    assert modes.count("/v1/chat/completions") == 5
    assert modes.count("/v1/completions") == 3
    assert server.behaviour.requests[-1][1]["ignore_eos"] is True


def test_examples_suit_the_default_model(demo: kie.Engine) -> None:
    """What a visitor clicks first is answered with Python that is whole."""
    text = (PAGE / "index.html").read_text()
    buttons = re.findall(r'<button[^>]*data-mode="(\w+)"([^>]*)data-prompt="([^"]*)"', text)
    assert len(buttons) == 8
    for mode, rest, prompt in buttons:
        asked, most = html.unescape(prompt), {"temperature": 0, "max_tokens": 256}
        if mode == "chat":
            done = demo.generate(messages=[{"role": "user", "content": asked}], **most)
            [function] = ast.parse(done.text).body
            assert isinstance(function, ast.FunctionDef), asked
            assert done.finish_reason == "stop"
        elif "data-endless" not in rest:
            ast.parse(asked + demo.generate(asked, **most).text)


def test_everything_has_a_name(page: Page) -> None:
    """What a screen reader says of a control, and the order of the tab key."""
    unnamed = page.evaluate(UNNAMED)
    assert unnamed == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        seen.append(str(page.evaluate("document.activeElement.id")))
    reached = ["theme", "mode", "prompt", "run", "max-tokens", "copy-curl", "own"]
    assert [name for name in seen if name in reached][: len(reached)] == reached


def test_what_is_copied_runs(page: Page, server: FakeServer) -> None:
    prompt = """It's "quoted" \\ with $HOME `x` and\ttab,\nnew line, é and \U0001f600"""
    server.behaviour.key = "sec'ret"
    run(page)
    page.get_by_test_id("key").fill("sec'ret")
    page.keyboard.press("Enter")
    finished(page)
    started: list[subprocess.Popen[bytes]] = []
    sent: dict[str, Any] = {}
    for mode in ("chat", "prompt"):
        page.get_by_test_id("mode").select_option(mode)
        page.locator("#top-k").fill("40")
        run(page, prompt=prompt, max_tokens="8", temperature="0.5", seed="9")
        path, body = server.behaviour.requests[-1]
        sent[path] = body
        for button, program in (("copy-curl", "bash"), ("copy-python", sys.executable)):
            command = [program, "-c", clipboard(page, button)]
            started.append(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            )
            expect(page.get_by_test_id(button)).not_to_have_text("Copied")
    for one in started:
        _, told = one.communicate(timeout=60)
        assert one.returncode == 0, told.decode()
    assert {path for path, _ in server.behaviour.requests[-4:]} == set(sent)
    for path, body in server.behaviour.requests[-4:]:
        for name in ("messages", "prompt", "max_tokens", "temperature", "seed", "top_k"):
            assert body.get(name) == sent[path].get(name)


def test_a_server_that_loads_is_waited_for(page: Page, server: FakeServer) -> None:
    server.behaviour.status = "loading"
    server.behaviour.refuse = [(503, {}, {"error": {"message": "loading"}})]
    page.get_by_test_id("run").click()
    expect(page.locator("#notice")).to_contain_text("loading the model")
    expect(page.locator("#state-text")).to_have_text("loading the model")
    server.behaviour.status = "ok"
    finished(page)
    expect(page.get_by_test_id("output")).to_contain_text("def sum")
    expect(page.locator("#notice")).to_be_hidden()


def test_a_key_is_asked_for(page: Page, server: FakeServer) -> None:
    server.behaviour.key = "secret"
    page.get_by_test_id("run").click()
    expect(page.get_by_test_id("key")).to_be_focused()
    page.get_by_test_id("key").fill("secret")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("output")).to_contain_text("def sum")
    finished(page)


def test_a_full_queue_is_tried_again(page: Page, server: FakeServer) -> None:
    full = {"error": {"message": "the queue is full", "code": "rate_limit_exceeded"}}
    server.behaviour.refuse = [(429, {"Retry-After": "1"}, full)]
    page.get_by_test_id("run").click()
    expect(page.locator("#notice")).to_contain_text("Trying again in 1 s")
    expect(page.get_by_test_id("output")).to_contain_text("def sum")
    finished(page)
    assert len(server.behaviour.requests) == 2


def test_a_refusal_names_its_field(page: Page, server: FakeServer) -> None:
    told = {"error": {"message": "max_tokens must be at least 1", "param": "max_tokens"}}
    server.behaviour.refuse = [(400, {}, told)]
    page.get_by_test_id("run").click()
    expect(page.locator("#notice")).to_contain_text("max_tokens must be at least 1")
    expect(page.get_by_test_id("max-tokens")).to_be_focused()
    expect(page.get_by_test_id("max-tokens")).to_have_attribute("aria-invalid", "true")


def test_lost_lines_and_late_errors(page: Page, server: FakeServer) -> None:
    server.behaviour.break_after = 10
    page.get_by_test_id("run").click()
    expect(page.locator("#notice")).to_contain_text("The 10 tokens so far are kept")
    assert page.get_by_test_id("output").text_content() == ANSWER[:40]
    server.behaviour.break_after = 0
    server.behaviour.error_after = 5
    page.get_by_role("button", name="Run again").click()
    expect(page.locator("#notice")).to_contain_text("the device hung")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_test_id("run").click()
    expect(page.locator("#notice")).to_contain_text("does not answer")


def test_themes_and_a_phone(browser: Browser, server: FakeServer) -> None:
    for scheme, other in (("dark", "light"), ("light", "dark")):
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
        page.goto(server.url)
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == scheme
        page.get_by_test_id("theme").click()
        assert page.evaluate(theme) == other
        run(page, max_tokens="300")
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide == 390, "the page is as wide as the phone"
        page.reload()
        assert page.evaluate(theme) == other
        page.close()


def coloured(page: Page, text: str, sizes: list[int], what: str = "code") -> list[list[str]]:
    """What the highlighter gives for `text` in pieces of these sizes in turn: kind and text."""
    return page.evaluate(COLOURED, [text, sizes, what])


def test_colours_are_what_python_reads(page: Page) -> None:
    """Strings, comments and numbers of a module of the standard library, against `tokenize`."""
    text = Path(textwrap.__file__).read_text()
    kinds = {tokenize.STRING: "string", tokenize.COMMENT: "comment", tokenize.NUMBER: "number"}
    wanted = [
        [kinds[token.type], token.string]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in kinds
    ]
    parts = coloured(page, text, [len(text)])
    assert "".join(part for _, part in parts) == text
    got = [part for part in parts if part[0] in kinds.values()]
    assert got == wanted
    words = {part for kind, part in parts if kind == "keyword"}
    assert {"def", "class", "return"} <= words <= set(keyword.kwlist)


def test_any_pieces_give_the_same_colours(page: Page) -> None:
    code = r'''
a = """x"y\"z""" + rb'q\'' # c
@dec.o
def f(x): return .5e-3 + x.list[0x1F]
b = ""
'''
    answer = f"Some `prose`:\n\n```python\n{code}```\nand more. def is a word.\n"
    for text, what in ((code, "code"), (answer, "answer"), (code, "answer")):
        whole = coloured(page, text, [len(text)], what)
        assert "".join(part for _, part in whole) == text
        for sizes in ([1], [2], [3], [5, 1, 7], [4, 1]):
            assert coloured(page, text, sizes, what) == whole
    kinds = {part: kind for kind, part in coloured(page, answer, [3], "answer")}
    assert kinds["and more. def is a word.\n"] == "prose"
    assert kinds["def"] == "keyword"
    assert kinds["@dec.o"] == "name"


def test_a_prompt_s_open_string_goes_on(page: Page, server: FakeServer) -> None:
    server.behaviour.answer = "for return \n"
    page.get_by_test_id("mode").select_option("prompt")
    text = run(page, prompt='def f():\n    """Doc', max_tokens="12")
    assert page.locator("#output .string").text_content() == text
