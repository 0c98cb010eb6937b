// A model of `modicum export --to onnx` in a web page: the loop of examples/onnx_generate.py with onnxruntime-web.

import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import * as ort from "onnxruntime-web";

ort.env.wasm.wasmPaths = new URL("node_modules/onnxruntime-web/dist/", import.meta.url).href;
ort.env.wasm.numThreads = 1; // more need headers (cross-origin isolation) that a plain file server does not send

// The model in `folder` (an address that ends with /): its graph, its tokenizer, its settings.
export async function load(folder) {
  const read = async (name) => (await fetch(new URL(name, folder))).json();
  const settings = (await read("genai_config.json")).model;
  const words = await read("tokenizer_config.json");
  const graph = new URL(settings.decoder.filename, folder).href;
  const outside = (await read("config.json"))["transformers.js_config"].use_external_data_format;
  const name = graph.split("/").at(-1);
  const externalData = outside ? [{ path: `${name}_data`, data: `${graph}_data` }] : [];
  const session = await ort.InferenceSession.create(graph, { executionProviders: ["wasm"], externalData });
  return { session, settings, words, tokenizer: new Tokenizer(await read("tokenizer.json"), words) };
}

// The ids of a question as the model was taught to read one; of a plain beginning where it knows no conversations.
export function encode({ tokenizer, words }, text) {
  if (!words.chat_template) return tokenizer.encode(text).ids;
  const { bos_token, eos_token } = words;
  const asked = { messages: [{ role: "user", content: text }], add_generation_prompt: true, bos_token, eos_token };
  return tokenizer.encode(new Template(words.chat_template).render(asked), { add_special_tokens: false }).ids;
}

// The likeliest continuation of `ids`, token by token, at most `tokens` long, until the model ends its answer.
export async function* generate({ session, settings }, ids, tokens) {
  const heads = settings.decoder.num_key_value_heads;
  const past = session.inputMetadata.filter((one) => one.name.startsWith("past_key_values."));
  const none = [1, heads, 0, settings.decoder.head_size]; // nothing is held at first
  let cache = past.map((one) => new ort.Tensor(one.type, one.type === "float16" ? new Uint16Array() : [], none));
  let fresh = ids;
  const room = Math.min(tokens, settings.context_length - ids.length);
  for (let step = 0; step < room; step++) {
    const held = cache[0].dims[2];
    const whole = (numbers) => new ort.Tensor("int64", BigInt64Array.from(numbers, BigInt), [1, numbers.length]);
    const said = await session.run({
      input_ids: whole(fresh),
      attention_mask: whole(Array(held + fresh.length).fill(1)),
      position_ids: whole(fresh.map((_, place) => held + place)),
      ...Object.fromEntries(past.map((one, number) => [one.name, cache[number]])),
    });
    cache = past.map((one) => said[one.name.replace("past_key_values", "present")]);
    const width = said.logits.dims[2];
    const last = said.logits.data.subarray(said.logits.data.length - width);
    const best = last.reduce((top, logit, token) => (logit > last[top] ? token : top), 0);
    if (settings.eos_token_id.includes(best)) return;
    yield best;
    fresh = [best];
  }
}
