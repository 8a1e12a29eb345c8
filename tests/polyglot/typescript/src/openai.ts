// OpenAI's own client for Node against a gateway of OpenTinker: a conversation with a tool, streamed and whole,
// and what errors look like. Prints what it found as one line of JSON.
import OpenAI from "openai";
import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";

const { values } = parseArgs({
  options: { url: { type: "string" }, "key-file": { type: "string" }, model: { type: "string" } },
});
const baseURL = values.url!;
const model = values.model!;
const apiKey = readFileSync(values["key-file"]!, "utf8").trim();
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });

const tools: OpenAI.Chat.Completions.ChatCompletionTool[] = [
  {
    type: "function",
    function: {
      name: "add",
      description: "Adds.",
      parameters: { type: "object", properties: { a: { type: "integer" } } },
    },
  },
];

const models: string[] = [];
for await (const each of client.models.list()) models.push(each.id);

const messages: OpenAI.Chat.Completions.ChatCompletionMessageParam[] = [{ role: "user", content: "1 + 1?" }];
const first = await client.chat.completions.create({ model, messages, tools });
const said = first.choices[0].message;
const call = said.tool_calls![0];
if (call.type !== "function") throw new Error("no function is called");
messages.push(said, { role: "tool", tool_call_id: call.id, content: "the tool says 2" });

let text = "";
let finish = "";
let tokens = 0;
const stream = await client.chat.completions.create({
  model,
  messages,
  tools,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta.content ?? "";
  finish ||= chunk.choices[0]?.finish_reason ?? "";
  tokens ||= chunk.usage?.completion_tokens ?? 0;
}

const errors: (string | null | undefined)[] = [];
const wrong = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
const failing = [
  () => wrong.models.list(),
  () => client.chat.completions.create({ model: "nobody", messages: [{ role: "user", content: "x" }] }),
  () => client.chat.completions.create({ model, messages: [{ role: "user", content: "x" }], verbosity: "low" }),
];
for (const ask of failing) {
  try {
    await ask();
    errors.push("none");
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    errors.push(`${error.status} ${error.code} ${error.param}`);
  }
}

console.log(
  JSON.stringify({
    models,
    finishFirst: first.choices[0].finish_reason,
    arguments: call.function.arguments,
    text,
    finish,
    tokens,
    errors,
  }),
);
