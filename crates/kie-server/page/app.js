// The playground: a form on one side, an answer on the other, and what connects them.

import { control, copy, fill, headers, keepKey, request, served, snippet } from "./form.js";
import * as notice from "./notice.js";
import { Stage } from "./stage.js";
import { Failure, TokenStream } from "./stream.js";

const $ = (id) => document.getElementById(id);
const HEALTH_EVERY_MS = 500;
const stage = new Stage();

/** The stream of the request that runs, null when none does. */
let running = null;
/** Messages of the last chat request, and of the conversation with its answer. */
let asked = null;
let conversation = null;

function say(text) {
  $("spoken").textContent = text;
}

function state(name, text) {
  $("state").dataset.state = name;
  $("state-text").textContent = text;
}

function busy(on) {
  $("run").disabled = on;
  $("cancel").disabled = !on;
  const open = !on && conversation !== null;
  $("follow-up").disabled = $("send").disabled = !open;
}

// ---- The server -------------------------------------------------------------------------------

/** "ok", "loading", or "" where nobody answers. */
async function health() {
  try {
    const answer = await fetch("health", { cache: "no-store" });
    return (await answer.json()).status ?? "";
  } catch {
    return "";
  }
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Waits until the server serves or `over` says so, showing what the server does meanwhile. */
async function ready(over = () => false) {
  for (;;) {
    const status = await health();
    if (over()) return;
    if (status === "ok") break;
    const loading = status === "loading";
    state(status || "lost", loading ? "loading the model" : status || "no connection");
    await sleep(HEALTH_EVERY_MS);
    if (over()) return;
  }
  state("ok", "ready");
  if (served.model === "default") await name();
}

/** Asks for the model's name. */
async function name() {
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    if (answer.status === 401) {
      state("key", "key needed");
      return;
    }
    const id = (await answer.json()).data?.[0]?.id;
    if (!id) return;
    served.model = id;
    $("model").textContent = id;
  } catch {
    // the page works with the name "default"
  }
}

// ---- A request --------------------------------------------------------------------------------

/** Runs the form, or the conversation with one more message. */
async function run(messages) {
  if (running || !$("composer").reportValidity()) return;
  notice.clear();
  document.querySelectorAll("[aria-invalid]").forEach((one) => one.removeAttribute("aria-invalid"));
  const wanted = request(messages);
  const stream = new TokenStream(() => stage.wake());
  running = stream;
  conversation = null;
  asked = wanted.body.messages ?? null;
  turns(wanted);
  busy(true);
  say("Waiting for the first token");
  const before = wanted.mode === "prompt" ? wanted.body.prompt : "";
  stage.begin(stream, wanted.mode, before, (ended, cancelled) => end(wanted, ended, cancelled));
  await start(stream, wanted);
}

/** Opens the stream; a server that loads is waited for. */
async function start(stream, { path, body }) {
  const asking = {
    ...body,
    stream: true,
    stream_options: { include_usage: true },
    stream_interval: 1, // a chunk a token: the chart shows each
  };
  for (;;) {
    try {
      await stream.open(path, asking, headers());
      state("busy", "generating");
      return;
    } catch (failure) {
      if (running !== stream) return;
      if (!(failure instanceof Failure)) throw failure;
      const loading = failure.kind === "loading" && (await health()) === "loading";
      if (!loading) {
        stream.fail(failure);
        return;
      }
      notice.show("The server is loading the model. The request starts when it is ready.");
      await ready(() => running !== stream);
      if (running !== stream) return;
      notice.clear();
    }
  }
}

function end(wanted, stream, cancelled) {
  running = null;
  const { failure } = stream;
  if (!failure && !cancelled && asked) {
    conversation = [...asked, { role: "assistant", content: stage.text }];
  }
  busy(false);
  if (failure) explain(failure, wanted);
  else state("ok", "ready");
  const seed = stream.seed;
  if (seed !== null && $("seed").value === "") $("seed").placeholder = `drew ${seed}`;
  const counted = `${stage.count} tokens, ${$("rate").textContent} tokens a second`;
  say(cancelled ? `Cancelled after ${counted}` : failure ? "" : `Done: ${counted}`);
}

/** Says what to do about a failure. */
function explain(failure, wanted) {
  const again = () => run(wanted.body.messages);
  const kept = stage.count ? ` The ${stage.count} tokens so far are kept.` : "";
  const retry = ["Run again", again];
  switch (failure.kind) {
    case "key":
      state("key", "key needed");
      notice.askKey("The server wants an API key (kie serve --api-key).", async (given) => {
        keepKey(given);
        await ready();
        again();
      });
      break;
    case "busy":
      state("ok", "ready");
      notice.countdown(
        failure.retryAfterS,
        (left) => `All slots and the queue are taken. Trying again in ${left} s.`,
        [["Try now", again]],
        again,
      );
      break;
    case "network":
    case "lost":
      state("lost", "no connection");
      notice.show(`${failure.message}${kept} Is kie serve still running?`, [retry]);
      ready();
      break;
    default:
      state("ok", "ready");
      notice.show(failure.message + kept, advice(failure, wanted, retry));
      mark(control(failure.param));
  }
}

/** Buttons that go with a refusal. */
function advice(failure, wanted, retry) {
  if (wanted.mode === "chat" && /template/i.test(failure.message)) {
    const plain = () => {
      $("mode").value = "prompt";
      run();
    };
    return [["Run as a plain prompt", plain]];
  }
  return failure.status === undefined || failure.status >= 500 ? [retry] : [];
}

function mark(field) {
  if (!field) return;
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

function cancel() {
  notice.clear();
  running?.abort();
  stage.stop();
}

// ---- Turns of a conversation ------------------------------------------------------------------

/** Puts what was said before above the answer, for a follow-up. */
function turns({ body }) {
  const history = $("history");
  const earlier = body.messages?.slice(0, -1) ?? [];
  if (!earlier.length) {
    history.replaceChildren();
    return;
  }
  const answer = document.createElement("div");
  answer.className = "code";
  answer.append(...$("output").childNodes);
  if (!history.childElementCount) history.append(bubble(body.messages[0].content));
  history.append(answer, bubble(body.messages.at(-1).content));
}

function bubble(text) {
  const said = document.createElement("p");
  said.className = "said";
  said.textContent = text;
  return said;
}

// ---- Controls ---------------------------------------------------------------------------------

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("reply").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = $("follow-up");
  if (!conversation || !field.value.trim()) return;
  const messages = [...conversation, { role: "user", content: field.value }];
  field.value = "";
  run(messages);
});
$("cancel").addEventListener("click", cancel);
$("examples").addEventListener("click", (event) => {
  const example = event.target.closest("button");
  if (!example || running) return;
  fill(example);
  run();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") cancel();
  else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  }
});

for (const kind of ["curl", "python"]) {
  const button = $(`copy-${kind}`);
  const label = button.textContent;
  button.addEventListener("click", async () => {
    const same = asked?.[0].content === $("prompt").value;
    const done = await copy(snippet(kind, same ? asked : undefined));
    button.textContent = done ? "Copied" : "The browser forbids it";
    say(done ? "Copied" : "The browser forbids copying");
    setTimeout(() => (button.textContent = label), 1500);
  });
}

function themed() {
  const dark = document.documentElement.dataset.theme === "dark";
  $("theme").setAttribute("aria-label", `Switch to the ${dark ? "light" : "dark"} theme`);
  stage.recolour();
}
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("kie-theme", root.dataset.theme);
  } catch {
    // storage may be forbidden: then it lasts as long as the page
  }
});
new MutationObserver(themed).observe(document.documentElement, { attributeFilter: ["data-theme"] });
themed();

if (/Mac|iPhone|iPad/.test(navigator.platform)) $("run-key").textContent = "Cmd Enter";
ready();
