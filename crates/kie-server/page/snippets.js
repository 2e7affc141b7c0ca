// The request as text that runs as it is: curl, and Python with the openai client.

const OPENAI_FIELDS = new Set([
  "model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed",
]);

/** One command line; the answer comes in one piece. */
export function curl(url, body, key) {
  const lines = [`curl ${shell(url)}`, `-H 'Content-Type: application/json'`];
  if (key) lines.push(`-H ${shell(`Authorization: Bearer ${key}`)}`);
  lines.push(`-d ${shell(JSON.stringify(body))}`);
  return `${lines.join(" \\\n  ")}\n`;
}

function shell(text) {
  return /^[\w./:=-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/** A script that prints the answer as it comes. */
export function python(base, body, key) {
  const own = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra))},`);
  const chat = "messages" in body;
  const call = chat ? "chat.completions" : "completions";
  const text = chat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `from openai import OpenAI  # pip install openai

client = OpenAI(base_url=${literal(base)}, api_key=${literal(key || "none")})
stream = client.${call}.create(
${lines.join("\n")}
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(${text} or "", end="", flush=True)
print()
`;
}

/** A value of JSON as Python writes it. */
function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    const parts = Object.entries(value).map(([name, one]) => `${literal(name)}: ${literal(one)}`);
    return `{${parts.join(", ")}}`;
  }
  return JSON.stringify(value); // strings and numbers: Python reads JSON's
}
