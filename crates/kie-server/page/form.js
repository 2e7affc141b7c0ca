// What the form says: the request, its key, and the text of it for other programs.

import { curl, python } from "./snippets.js";

const $ = (id) => document.getElementById(id);
const KEY = "kie-key";

/** The model's name as the server tells it; "default" is whatever is served. */
export const served = { model: "default" };

/** The path that a mode is served at, from the page's own place. */
const PATHS = { chat: "v1/chat/completions", prompt: "v1/completions" };

/** `{path, mode, body}` of the form, with `messages` in place of the prompt where given. */
export function request(messages) {
  const mode = $("mode").value;
  const prompt = $("prompt").value;
  const body = { model: served.model };
  if (mode === "chat") body.messages = messages ?? [{ role: "user", content: prompt }];
  else body.prompt = prompt;
  for (const field of document.querySelectorAll("[data-field]")) {
    if (field.value !== "") body[field.dataset.field] = Number(field.value);
  }
  if ($("endless").checked) body.ignore_eos = true;
  return { path: PATHS[mode], mode, body };
}

/** The control that a field of the request came from, null where there is none. */
export function control(param) {
  if (!param) return null;
  const field = param.split(/[.[]/)[0];
  if (field === "messages" || field === "prompt") return $("prompt");
  return document.querySelector(`[data-field="${CSS.escape(field)}"]`);
}

/** Puts an example into the form. */
export function fill(example) {
  $("mode").value = example.dataset.mode;
  $("prompt").value = example.dataset.prompt;
  $("max-tokens").value = example.dataset.max ?? "256";
  $("endless").checked = "endless" in example.dataset;
}

/** The key that this tab was given, "" without one. */
export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return keyHere;
  }
}

let keyHere = "";

/** Keeps a key for this tab. */
export function keepKey(value) {
  keyHere = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // storage may be forbidden: then it lasts as long as the page
  }
}

/** Headers of every request. */
export function headers() {
  const own = key();
  const json = { "Content-Type": "application/json" };
  return own ? { ...json, Authorization: `Bearer ${own}` } : json;
}

/** The request as a program: `kind` is "curl" or "python". */
export function snippet(kind, messages) {
  const { path, body } = request(messages);
  if (kind === "curl") return curl(new URL(path, document.baseURI).href, body, key());
  return python(new URL("v1", document.baseURI).href, body, key());
}

/** Puts text on the clipboard; false where the browser forbids it. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyOld(text);
  }
}

// Pages that are not served from this machine or by TLS have no clipboard of their own.
function copyOld(text) {
  const area = document.createElement("textarea");
  const focus = document.activeElement;
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focus?.focus();
  return done;
}
