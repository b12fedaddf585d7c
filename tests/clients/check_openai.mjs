// The npm package openai against the demo model (argument 1) and a scripted one (argument 2).
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [demoUrl, scriptedUrl, modules] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${modules}/`));
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);
const { version } = JSON.parse(readFileSync(`${modules}/node_modules/openai/package.json`));

const messages = [{ role: "user", content: "What is the capital of France?" }];
const answer = "The capital of France is Paris.";
const demo = new OpenAI({ baseURL: demoUrl, apiKey: "none", maxRetries: 0 });
const ask = { model: "demo", messages, temperature: 0 };

const whole = await demo.chat.completions.create(ask);
assert.equal(whole.choices[0].message.content, answer);
assert.ok(whole.usage.completion_tokens > 5);
assert.ok(whole.timings.decode_tokens > 5);

let text = "";
let usage;
const stream = await demo.chat.completions.create({
  ...ask, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, answer);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const together = await Promise.all([1, 2, 3, 4].map(() => demo.chat.completions.create(ask)));
assert.deepEqual(together.map((c) => c.choices[0].message.content), Array(4).fill(answer));

// A client that leaves: the next answer comes all the same.
const left = await demo.chat.completions.create({ ...ask, stream: true });
for await (const _ of left) break;
assert.equal((await demo.chat.completions.create(ask)).choices[0].message.content, answer);
assert.equal((await demo.models.list()).data.length, 1);

const scripted = new OpenAI({ baseURL: scriptedUrl, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } } };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const runner = scripted.chat.completions.runTools({
  model: "m", messages,
  tools: [{
    type: "function",
    function: {
      name: "weather", parameters, parse: JSON.parse, description: "Now.",
      function: ({ city }) => `sunny in ${city}`,
    },
  }],
});
assert.equal(await runner.finalContent(), "It is sunny in Paris.");
const streamed = await scripted.chat.completions.stream({ model: "m", messages, tools }).finalChatCompletion();
const [call] = streamed.choices[0].message.tool_calls;
assert.deepEqual([call.function.name, call.function.arguments], ["weather", '{"city": "Paris"}']);
await assert.rejects(
  scripted.chat.completions.create({ model: "m", messages: [{ role: "user", content: "x".repeat(9000) }] }),
  (error) => error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded",
);
console.log(`npm openai ${version} on node ${process.version}: chat, usage, stream with usage, 4 at once,`);
console.log("  leaving a stream, models, runTools, streamed tool call, an over-long prompt as its own exception");
