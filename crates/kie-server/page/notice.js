// What went wrong and what to do about it, over the answer so that nothing moves.

const box = document.getElementById("notice");
let ticking = 0;

/** Takes the notice away. */
export function clear() {
  clearInterval(ticking);
  box.hidden = true;
  box.replaceChildren();
}

/** Shows `text` and a button for each `[label, call]`; `more` is put between. */
export function show(text, actions = [], more = null) {
  clear();
  const line = document.createElement("p");
  line.textContent = text;
  box.append(line);
  if (more) box.append(more);
  const row = document.createElement("div");
  row.className = "actions";
  for (const [label, call] of [...actions, ["Close", clear]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = label;
    button.addEventListener("click", call);
    row.append(button);
  }
  box.append(row);
  box.hidden = false;
  return line;
}

/** Counts down in the notice: `text(seconds)` while it waits, then `call`. */
export function countdown(seconds, text, actions, call) {
  let left = Math.ceil(seconds);
  const line = show(text(left), actions);
  ticking = setInterval(() => {
    left -= 1;
    if (left > 0) {
      line.textContent = text(left);
      return;
    }
    clear();
    call();
  }, 1000);
}

/** Asks for the API key; `call` gets it. */
export function askKey(text, call) {
  const form = document.createElement("form");
  form.className = "key";
  const label = document.createElement("label");
  label.textContent = "API key ";
  const field = document.createElement("input");
  Object.assign(field, { type: "password", id: "key", autocomplete: "off", required: true });
  field.dataset.testid = "key";
  const button = document.createElement("button");
  button.textContent = "Use it";
  label.append(field);
  form.append(label, button);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clear();
    call(field.value);
  });
  show(text, [], form);
  field.focus();
}
