// Questions to an exported directory by transformers.js: node ask_in_node.mjs DIRECTORY SAMPLES.json native|wasm [fp32|q8]
// Each sample is {pictures: [file], question} for the processor, or {ids, pixels, shape} without it; one line of JSON for each answer.
// With {expected} for the processor, a file of float32, the line has the largest difference of pixels of each tile.
import { readFileSync } from 'node:fs';
import { basename, dirname } from 'node:path';

const [folder, file, backend, dtype = 'fp32'] = process.argv.slice(2);
// transformers.js takes a runtime that it finds here: what a browser would load, instead of Node's own
if (backend === 'wasm') globalThis[Symbol.for('onnxruntime')] = await import('onnxruntime-web');
const { AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, RawImage, Tensor, env } = await import('@huggingface/transformers');
env.allowRemoteModels = false;
if (backend === 'wasm') {
  env.backends.onnx.wasm.wasmPaths = new URL('./node_modules/onnxruntime-web/dist/', import.meta.url).href; // not from a network
  env.useWasmCache = false;
}
env.localModelPath = dirname(folder) + '/';
const name = basename(folder), samples = JSON.parse(readFileSync(file));
const tokenizer = await AutoTokenizer.from_pretrained(name);
const processor = 'question' in samples[0] ? await AutoProcessor.from_pretrained(name) : null;
const how = backend === 'wasm' ? { device: 'auto', session_options: { executionProviders: ['wasm'] } } : {};
const model = await AutoModelForImageTextToText.from_pretrained(name, { dtype, ...how });

async function asked({ pictures, question }) {
  const content = [...pictures.map(() => ({ type: 'image' })), { type: 'text', text: question }];
  const text = tokenizer.apply_chat_template([{ role: 'user', content }], { add_generation_prompt: true, tokenize: false });
  if (!pictures.length) return tokenizer(text, { add_special_tokens: false });
  return await processor(text, await Promise.all(pictures.map((p) => RawImage.read(p))));
}

const floats = (bytes) => new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);

function differences({ data, dims }, expected) {
  const want = floats(readFileSync(expected)), size = want.length / dims[1], out = new Array(dims[1]).fill(0);
  for (let i = 0; i < want.length; ++i) out[Math.floor(i / size)] = Math.max(out[Math.floor(i / size)], Math.abs(data[i] - want[i]));
  return out;
}

function given({ ids, pixels, shape }) {
  const input_ids = new Tensor('int64', BigInt64Array.from(ids.map(BigInt)), [1, ids.length]);
  const text = { input_ids, attention_mask: new Tensor('int64', new BigInt64Array(ids.length).fill(1n), [1, ids.length]) };
  if (!pixels) return text;
  const tiles = [1, shape[0], ...shape.slice(2)];
  const pixel_values = new Tensor('float32', floats(readFileSync(pixels)), [1, ...shape]);
  const pixel_attention_mask = new Tensor('bool', new Uint8Array(tiles.reduce((a, b) => a * b)).fill(1), tiles);
  return { ...text, pixel_values, pixel_attention_mask };
}

for (const sample of samples) {
  const inputs = sample.ids ? given(sample) : await asked(sample);
  const out = (await model.generate({ ...inputs, max_new_tokens: sample.most ?? 16, do_sample: false })).tolist()[0].map(Number);
  const length = inputs.input_ids.dims[1], said = out.slice(length);
  const seen = sample.expected ? { differs: differences(inputs.pixel_values, sample.expected) } : {};
  console.log(JSON.stringify({ ...seen, ids: out.slice(0, length), said, answer: tokenizer.decode(said, { skip_special_tokens: true }) }));
}
