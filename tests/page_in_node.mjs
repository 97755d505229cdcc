// Parts of the page of `nanovlm export --format web`, on what a file of JSON has: node page_in_node.mjs page.js CASES.json
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const page = await import(pathToFileURL(process.argv[2])), cases = JSON.parse(readFileSync(process.argv[3]));
const tokenizer = cases.tokenizer && new page.Tokenizer(cases.tokenizer);
const hex = (bytes) => Buffer.from(bytes).toString('hex');
const picture = ({ width, height, data }) => ({ width, height, data: Uint8Array.from(Buffer.from(data, 'hex')) });
const spoken = (ids) => { const next = tokenizer.decoder(); return ids.map((i) => next(i)).join('') + next(); };
const shown = (p, how) => { const seen = page.cut(picture(p), how); return { tiles: seen.tiles.map(hex), grid: [seen.rows, seen.columns], text: page.pictureText(seen, how) }; };
console.log(JSON.stringify({
  ids: cases.texts?.map((t) => tokenizer.encode(t)), spoken: cases.ids?.map(spoken), neutral: cases.texts?.map((t) => tokenizer.neutralise(t)),
  shown: cases.pictures?.map((p) => shown(p, cases.how)),
}));
