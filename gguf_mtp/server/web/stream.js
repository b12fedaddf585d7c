// Answers from the server as they come. Knows the protocol and nothing of the page.

/** What the server refused with, or a connection that broke; `status` 0 for the latter. */
export class Refusal extends Error {
  constructor(message, status, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Fetches; throws a Refusal with the server's own sentence unless it answers with success. */
export async function call(path, key, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal("the server cannot be reached", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const { message, code } = body?.error ?? {};
  throw new Refusal(message ?? `the server answered ${response.status}`, response.status, code);
}

/** The events of a chat completion, parsed, until the last one. */
export async function* chat(body, key, signal) {
  const response = await call("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, return_token_sources: true }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refusal(event.error.message, response.status);
    yield event;
  }
  throw new Refusal("the connection closed before the answer was complete", 0);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (block.startsWith("data: ")) yield block.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The server's own estimate of what drafting gains; null while it has none. */
export async function speedUp(key) {
  const text = await (await call("metrics", key)).text();
  const found = text.match(/^gguf_mtp:estimated_speed_up (\S+)$/m);
  return found ? Number(found[1]) : null;
}
