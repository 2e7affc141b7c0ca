// Reads one streamed answer in a worker: bytes that come 5,000 times a second cost the page
// nothing, and each has the time at which it came. The page gets a batch at most every 4 ms. A
// reader reads one answer; the page ends it to close the connection.

const BATCH_MS = 4;
const decoder = new TextDecoder();
let text = "";
let data = [];
let batch = [];
let told = {};
let due = 0;
let timer = null;
let originMs = 0;

onmessage = ({ data: asked }) => read(asked);

/** Milliseconds of the page's `performance.now()`: a worker counts from its own start. */
function now() {
  return performance.timeOrigin - originMs + performance.now();
}

async function read({ path, body, headers, timeOrigin }) {
  originMs = timeOrigin;
  let answer;
  try {
    answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  } catch {
    fail({ kind: "network", message: "The server does not answer." });
    return;
  }
  if (!answer.ok) {
    fail(await refusal(answer));
    return;
  }
  postMessage({ open: true });
  try {
    await pump(answer.body.getReader());
    fail({ kind: "lost", message: "The connection was lost before the answer's end." });
  } catch {
    fail({ kind: "lost", message: "The connection was lost." });
  }
}

async function pump(reader) {
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const at = now();
    text += decoder.decode(value, { stream: true });
    lines(at);
    if (at >= due) flush();
    else timer ??= setTimeout(flush, BATCH_MS);
  }
}

function flush() {
  clearTimeout(timer);
  timer = null;
  due = now() + BATCH_MS;
  if (batch.length || Object.keys(told).length) postMessage({ batch, told });
  batch = [];
  told = {};
}

/** The end, with its reason; what comes after it is not listened to. */
function fail(failure) {
  flush();
  postMessage({ done: true, failure });
}

function lines(at) {
  let from = 0;
  for (;;) {
    const end = text.indexOf("\n", from);
    if (end < 0) break;
    const line = text.slice(from, text[end - 1] === "\r" ? end - 1 : end);
    from = end + 1;
    if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line === "" && data.length) {
      event(data.join("\n"), at);
      data = [];
    }
  }
  text = text.slice(from);
}

function event(json, at) {
  if (json === "[DONE]") {
    fail(null);
    return;
  }
  let chunk;
  try {
    chunk = JSON.parse(json);
  } catch {
    chunk = { error: { message: "The server sent an event that is no JSON." } };
  }
  if (chunk.error) {
    fail({ kind: "refused", message: chunk.error.message, param: chunk.error.param });
    return;
  }
  for (const name of ["usage", "timings", "seed"]) told[name] = chunk[name] ?? told[name];
  const choice = chunk.choices?.[0];
  if (!choice) return;
  told.finishReason = choice.finish_reason ?? told.finishReason;
  const piece = choice.delta
    ? (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "")
    : choice.text;
  if (piece) batch.push({ at, text: piece });
}

/** An answer that is not 200, in words. */
async function refusal(answer) {
  const json = await answer.json().catch(() => ({}));
  const kinds = { 401: "key", 429: "busy", 503: "loading" };
  return {
    kind: kinds[answer.status] ?? "refused",
    message: json.error?.message ?? `The server answered ${answer.status}.`,
    param: json.error?.param,
    status: answer.status,
    retryAfterS: Number(answer.headers.get("retry-after")) || 1,
  };
}
