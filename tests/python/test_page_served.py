"""The playground that `kie serve` serves, with the default model behind it."""

from __future__ import annotations

from kie.bench.layers import serving
from playwright.sync_api import expect, sync_playwright
from test_page import CHROMIUM, clipboard, finished


def test_a_visitor_gets_an_answer() -> None:
    with serving(["--device", "cpu", "--threads", "1"]) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        context.set_default_timeout(60_000)
        page = context.new_page()
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda line: said.append(line.text))
        page.goto(url)
        expect(page.locator("#state-text")).to_have_text("ready", timeout=60_000)
        page.get_by_test_id("max-tokens").fill("48")
        page.get_by_test_id("run").click()
        expect(page.get_by_test_id("output")).to_contain_text("return", timeout=60_000)
        finished(page)
        answer = page.get_by_test_id("output").text_content() or ""
        # What the model says is what it means: the function is right.
        scope: dict[str, object] = {}
        exec(answer, scope)
        (function,) = [value for value in scope.values() if hasattr(value, "__code__")]
        assert function([1, 2, 3, 4]) == 20  # type: ignore[operator]
        assert float(page.get_by_test_id("rate").inner_text()) > 0
        assert "stop" in page.locator("#output-tokens").inner_text()
        page.get_by_test_id("mode").select_option("prompt")
        page.get_by_test_id("prompt").fill("def fibonacci(")
        page.keyboard.press("Control+Enter")
        finished(page)
        assert url in clipboard(page, "copy-curl")
        assert said == []
        browser.close()
