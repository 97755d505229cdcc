// The page that `nanovlm export --format web` writes: a picture and a question go in, an answer comes out, in this browser.
// Part of nanovlm_nb, Apache-2.0. In Node it is a module without a page: tests use its parts.

// --- text: a byte-level BPE tokenizer, from tokenizer.json

const SPACE = '\\p{White_Space}';
const WORDS = new RegExp(`'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^${SPACE}\\p{L}\\p{N}]+|${SPACE}+(?!\\P{White_Space})|${SPACE}+`, 'gu');
const DIGITS = /\p{N}|\P{N}+/gu;
const anyOf = (texts) => new RegExp(texts.map((t) => t.replace(/[.*+?^${}()|[\]\\]/g, '\\$&')).join('|') || '(?!)', 'gu');
const longestFirst = (texts) => [...texts].sort((a, b) => b.length - a.length || (a < b ? -1 : 1));

function byteAlphabet() { // a printable character for each byte, as in GPT-2
  const own = (b) => (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
  let others = 256;
  return Array.from({ length: 256 }, (_, b) => String.fromCodePoint(own(b) ? b : others++));
}

export const strip = (text) => text.replace(/^[\p{White_Space}\x1c-\x1f]+|[\p{White_Space}\x1c-\x1f]+$/gu, ''); // as Python's

export class Tokenizer {
  constructor({ model, added_tokens, pre_tokenizer }) {
    this.letters = byteAlphabet();
    this.bytes = new Map(this.letters.map((c, b) => [c, b]));
    this.vocab = new Map(Object.entries(model.vocab));
    this.tokens = new Map([...this.vocab].map(([t, i]) => [i, t]));
    this.ranks = new Map(model.merges.map((m, rank) => [Array.isArray(m) ? m.join(' ') : m, rank]));
    this.whole = model.ignore_merges ?? false;
    this.digits = (pre_tokenizer.pretokenizers ?? []).some((p) => p.type === 'Digits');
    this.added = new Map(added_tokens.map((t) => [t.content, t.id]));
    this.addedTexts = new Map(added_tokens.map((t) => [t.id, t.special ? '' : t.content]));
    this.cuts = anyOf(longestFirst(this.added.keys()));
    this.special = anyOf(longestFirst(added_tokens.filter((t) => t.special).map((t) => t.content)));
  }

  encode(text) {
    const ids = [];
    let from = 0;
    for (const { 0: token, index } of text.matchAll(this.cuts)) {
      ids.push(...this.plain(text.slice(from, index)), this.added.get(token));
      from = index + token.length;
    }
    return [...ids, ...this.plain(text.slice(from))];
  }

  plain(text) {
    const parts = this.digits ? text.match(DIGITS) ?? [] : [text];
    return parts.flatMap((p) => p.match(WORDS) ?? []).flatMap((word) => this.merged(word));
  }

  merged(word) {
    const letters = Array.from(new TextEncoder().encode(word), (b) => this.letters[b]);
    if (this.whole && this.vocab.has(letters.join(''))) return [this.vocab.get(letters.join(''))];
    for (;;) {
      let best = Infinity, at = -1;
      for (let i = 0; i + 1 < letters.length; ++i) {
        const rank = this.ranks.get(`${letters[i]} ${letters[i + 1]}`) ?? Infinity;
        if (rank < best) [best, at] = [rank, i];
      }
      if (at < 0) return letters.map((t) => this.vocab.get(t));
      letters.splice(at, 2, letters[at] + letters[at + 1]);
    }
  }

  decoder() { // a function from the next id to what it adds to the text; without an id: what was held back
    const utf8 = new TextDecoder('utf-8', { ignoreBOM: true });
    const flush = () => utf8.decode();
    return (id) => {
      if (id === undefined) return flush();
      if (this.addedTexts.has(id)) return this.addedTexts.get(id) && flush() + this.addedTexts.get(id);
      const token = this.tokens.get(id) ?? '';
      return utf8.decode(Uint8Array.from(token, (c) => this.bytes.get(c)), { stream: true });
    };
  }

  neutralise(text) { // special tokens in a visitor's text are text: they are broken after their first character
    const within = [...'\u200b\u2060\ufeff'].find((c) => !this.special.source.includes(c));
    const broken = text.replace(this.special, (t) => Array.from(t, (c, i) => (i === 0 ? c + within : c)).join(''));
    return broken === text ? text : this.neutralise(broken);
  }
}

// --- pictures: {width, height, data} with three bytes a pixel; resized as Pillow does it, to the bit

const BITS = 22; // of a weight behind the point
const sinc = (x) => (x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI));
const FILTERS = {
  bicubic: [2, (x) => ((x = Math.abs(x)) < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0)],
  lanczos: [3, (x) => (-3 <= x && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

function weights(from, to, [reach, curve]) { // of each new pixel: the first old one that counts, and how much each counts
  const scale = from / to, wide = Math.max(scale, 1), support = reach * wide;
  return Array.from({ length: to }, (_, i) => {
    const middle = (i + 0.5) * scale, first = Math.max(0, Math.trunc(middle - support + 0.5));
    const last = Math.min(from, Math.trunc(middle + support + 0.5));
    const all = Array.from({ length: last - first }, (_, j) => curve((j + first - middle + 0.5) * (1 / wide)));
    const sum = all.reduce((a, b) => a + b, 0);
    const whole = all.map((w) => (sum === 0 ? w : w / sum) * 2 ** BITS);
    return { first, counts: Int32Array.from(whole, (w) => Math.trunc(w < 0 ? w - 0.5 : w + 0.5)) };
  });
}

function pass(data, lines, step, next, ways, out, outStep, outNext) { // one direction: along `step`, for each of `lines`
  for (let line = 0; line < lines; ++line)
    ways.forEach(({ first, counts }, i) => {
      for (let c = 0; c < 3; ++c) {
        let sum = 1 << (BITS - 1), at = line * next + first * step + c;
        for (let j = 0; j < counts.length; ++j, at += step) sum += data[at] * counts[j];
        out[line * outNext + i * outStep + c] = Math.min(255, Math.max(0, sum >> BITS));
      }
    });
  return out;
}

const across = ({ width, height, data }, w, filter) => (w === width ? { width, height, data } : {
  width: w, height, data: pass(data, height, 3, 3 * width, weights(width, w, filter), new Uint8Array(3 * w * height), 3, 3 * w),
});
const down = ({ width, height, data }, h, filter) => (h === height ? { width, height, data } : {
  width, height: h, data: pass(data, width, 3 * width, 3, weights(height, h, filter), new Uint8Array(3 * width * h), 3 * width, 3),
});

export function resize(picture, w, h, filter, tallFirst) { // `tallFirst`: pictures that lose more height than width begin with it, as in Pillow 13
  const curve = FILTERS[filter], lost = picture.height - h;
  if (tallFirst && lost > 0 && lost > 2 * (picture.width - w)) return across(down(picture, h, curve), w, curve);
  return down(across(picture, w, curve), h, curve);
}

function cutOut({ width, data }, x, y, side) {
  const out = new Uint8Array(3 * side * side);
  for (let row = 0; row < side; ++row) out.set(data.subarray(3 * ((y + row) * width + x), 3 * ((y + row) * width + x + side)), 3 * row * side);
  return out;
}

const upTo = (x, tile) => Math.ceil(x / tile) * tile;

export function gridSizes(w, h, { convention, tile, longest, enlarge }) { // sizes that a picture passes through; the last is a grid of tiles
  const long = Math.max(w, h), wide = w >= h;
  if (convention === 'smolvlm') {
    let short = Math.trunc(wide ? longest / (w / h) : longest * (w / h));
    short = Math.max(1, short + (short % 2));
    const [a, b] = wide ? [longest, short] : [short, longest], ratio = a / b;
    const second = wide ? [upTo(a, tile), upTo(Math.trunc(upTo(a, tile) / ratio), tile)] : [upTo(Math.trunc(upTo(b, tile) * ratio), tile), upTo(b, tile)];
    return [[a, b], second];
  }
  const newLong = enlarge ? longest : Math.min(longest, upTo(long, tile));
  const newShort = Math.ceil((Math.min(w, h) * newLong) / (long * tile)) * tile;
  return [wide ? [newLong, newShort] : [newShort, newLong]];
}

const { fround } = Math;
const roundEven = (x) => { const f = Math.floor(x), d = x - f; return d > 0.5 || (d === 0.5 && f % 2) ? f + 1 : f; };

function globalView({ width, height, data }, tile) { // the whole picture as one tile, as `images.global_view`
  const n = height / tile, m = width / tile, out = new Uint8Array(3 * tile * tile);
  const columns = Array.from({ length: tile }, (_, i) => {
    const middle = fround(m * (i + 0.5)), first = Math.max(0, Math.trunc(middle - m + 0.5)), last = Math.min(width, Math.trunc(middle + m + 0.5));
    const all = Array.from({ length: last - first }, (_, j) => fround(Math.max(0, 1 - Math.abs(fround(fround(j + first - middle + 0.5) * fround(1 / m))))));
    const sum = all.reduce((a, b) => fround(a + b), 0);
    return { first, all: all.map((w) => fround(w / sum)) };
  });
  const lines = Array.from({ length: tile }, (_, i) => blockWeights(i, n, tile));
  for (let i = 0; i < tile; ++i) {
    const total = lines[i].reduce((a, { weight }) => a + weight, 0);
    for (let c = 0; c < 3; ++c) {
      const line = Array.from({ length: width }, (_, x) => lines[i].reduce((a, { row, weight }) => a + weight * data[3 * (row * width + x) + c], 0));
      columns.forEach(({ first, all }, x) => {
        const sum = all.reduce((a, w, j) => fround(a + fround(w * line[first + j])), 0);
        out[3 * (i * tile + x) + c] = roundEven(fround(sum / total));
      });
    }
  }
  return out;
}

function blockWeights(i, n, blocks) { // rows that count for a block of n, as `images._shrink` weighs them
  const out = [], add = (block, j, weight) => block >= 0 && block < blocks && weight && out.push({ row: block * n + j, weight });
  for (let j = 0; j < n; ++j) {
    const off = 2 * j + 1 - n;
    add(i, j, 2 * n - Math.abs(off));
    if (off > 0) add(i - 1, j, off);
    if (off < 0) add(i + 1, j, -off);
  }
  return out;
}

export function cut(picture, how) { // tiles of a picture as the model sees them, in order, and their grid
  const { tile } = how, small = how.convention === 'smolvlm', to = (p, [w, h]) => resize(p, w, h, small ? 'lanczos' : 'bicubic', how.tall_first);
  const whole = gridSizes(picture.width, picture.height, how).reduce(to, picture);
  const rows = whole.height / tile, columns = whole.width / tile, tiles = [];
  for (let r = 0; r < rows; ++r) for (let c = 0; c < columns; ++c) tiles.push(cutOut(whole, c * tile, r * tile, tile));
  if (tiles.length > 1 && small) tiles.push(to(whole, [tile, tile]).data);
  else if (tiles.length > 1) tiles.unshift(globalView(whole, tile));
  return { tiles, rows, columns };
}

export function pixels(tiles, { tile, mean, std }) { // floats, a plane for each colour
  const plane = tile * tile, out = new Float32Array(tiles.length * 3 * plane), of = (v, c) => fround(v[v.length === 1 ? 0 : c]);
  tiles.forEach((data, t) => {
    for (let c = 0; c < 3; ++c)
      for (let i = 0; i < plane; ++i) {
        const x = fround(data[3 * i + c] / 255);
        out[(3 * t + c) * plane + i] = fround(fround(x - of(mean, c)) / of(std, c));
      }
  });
  return out;
}

// --- the prompt

export function pictureText({ rows, columns }, { convention, tokens, tokens_per_tile: n }) { // as `prompts.get_image_string`
  const features = tokens.image_token.repeat(n), names = [];
  for (let r = 1; r <= rows; ++r) for (let c = 1; c <= columns; ++c) names.push(`r${r}c${c}`);
  const one = names.length === 1;
  const token = (name) => { if (!(name in tokens)) throw new Error(`This picture has more tiles than the model has names for (${name}).`); return tokens[name] + features; };
  if (convention === 'smolvlm') {
    const fake = tokens.fake_image_token, lines = [];
    if (!one) for (let r = 0; r < rows; ++r) lines.push(...names.slice(r * columns, (r + 1) * columns).map((name) => fake + token(name)), '\n');
    return [...lines, one ? '' : '\n', fake, token('global_image_token'), fake].join('');
  }
  if (one) return 'global_image_token' in tokens ? token('global_image_token') : features;
  return [token('global_image_token'), ...names.map(token)].join('');
}

// --- the model

export class Model {
  constructor(ort, note, tokenizer, sessions) { Object.assign(this, { ort, note, tokenizer, sessions }); }

  static async load(ort, read, heard = () => {}) { // `read` fetches a file of the folder
    const names = ['vision_encoder', 'embed_tokens', 'decoder_model_merged'], sessions = {};
    const note = JSON.parse(new TextDecoder().decode(await read('model/nanovlm_onnx.json')));
    const tokenizer = new Tokenizer(JSON.parse(new TextDecoder().decode(await read('model/tokenizer.json'))));
    for (const [i, name] of names.entries()) {
      heard(`Loading the model: file ${i + 1} of ${names.length}.`);
      sessions[name] = await ort.InferenceSession.create(await read(`model/${name}.onnx`), { executionProviders: ['wasm'] });
    }
    return new Model(ort, note, tokenizer, sessions);
  }

  longs(values) { return new this.ort.Tensor('int64', BigInt64Array.from(values, BigInt), [1, values.length]); }

  async embed(ids) { return (await this.sessions.embed_tokens.run({ input_ids: this.longs(ids) })).inputs_embeds; }

  async see(tiles) {
    const { Tensor } = this.ort, how = this.note.picture, n = tiles.length, side = how.tile;
    const pixel_values = new Tensor('float32', pixels(tiles, how), [1, n, 3, side, side]);
    const pixel_attention_mask = new Tensor('bool', new Uint8Array(n * side * side).fill(1), [1, n, side, side]);
    return (await this.sessions.vision_encoder.run({ pixel_values, pixel_attention_mask })).image_features;
  }

  prompt(seen, question) { // ids of a question about a picture
    const [before, after] = this.note.prompt.picture;
    return this.tokenizer.encode(before + pictureText(seen, this.note.picture) + this.tokenizer.neutralise(question) + after);
  }

  empty() { // keys and values before anything is read
    const { blocks, heads, width } = this.note.cache, past = {};
    for (let i = 0; i < blocks; ++i) for (const kind of ['key', 'value']) past[`past_key_values.${i}.${kind}`] = new this.ort.Tensor('float32', new Float32Array(0), [1, heads, 0, width]);
    return past;
  }

  async read(embeds, past, start) { // scores of the next token, the longer past, and where the new positions looked
    const length = embeds.dims[1], end = start + length, places = Array.from({ length: end }, (_, i) => i);
    const out = await this.sessions.decoder_model_merged.run({
      ...past, inputs_embeds: embeds, position_ids: this.longs(places.slice(start)), attention_mask: this.longs(places.map(() => 1)),
      num_logits_to_keep: new this.ort.Tensor('int64', [1n], []),
    });
    const kept = Object.fromEntries(Object.keys(past).map((name) => [name, out[name.replace('past_key_values', 'present')]]));
    const rows = Array.from({ length }, (_, i) => out.attention.data.slice(i * end, (i + 1) * end));
    return { scores: out.logits.data, kept, rows };
  }

  async ask(picture, question, most, heard = () => true) { // the answer, and the heat of each image token; null once `heard` wants no more
    const { image, end } = this.note.tokens, seen = cut(picture, this.note.picture), ids = this.prompt(seen, question);
    if (ids.length + most > this.note.positions) throw new Error(`Picture and question are ${ids.length} tokens, with the answer more than the ${this.note.positions} that the model can read: ask about a smaller picture.`);
    const embeds = await this.embed(ids), features = await this.see(seen.tiles), width = embeds.dims[2];
    const slots = ids.flatMap((id, i) => (id === image ? [i] : []));
    slots.forEach((slot, i) => embeds.data.set(features.data.subarray(i * width, (i + 1) * width), slot * width));
    let { scores, kept, rows } = await this.read(embeds, this.empty(), 0);
    const looks = rows.slice(slots.at(-1) + 1), asked = looks.length, said = [], next = this.tokenizer.decoder();
    let answer = '';
    for (;;) {
      const id = scores.reduce((best, s, i) => (s > scores[best] ? i : best), 0);
      if (id === end) break;
      said.push(id);
      answer += next(id);
      if (!(await heard(answer))) return null;
      if (said.length === most) break;
      ({ scores, kept, rows } = await this.read(await this.embed([id]), kept, ids.length + said.length - 1));
      looks.push(...rows);
    }
    answer = strip(answer + next());
    const counted = looks.slice(0, asked + Math.max(0, said.length - 1)); // the last token is said, and reads nothing
    const values = slots.map((slot) => counted.reduce((sum, row) => sum + row[slot], 0) / counted.length);
    return { answer, ids, said, heat: heatOf(values, seen, this.note.picture) };
  }
}

// --- where it looked, as `heatmap.Heat`

const SPREAD = 0.75; // width of a token's spot, in sides of its square

export function heatOf(values, { rows, columns }, { convention }) { // tokens by place: the view of the whole, and the tiles
  const n = rows * columns, tiles = n + (n > 1), each = values.length / tiles, side = Math.sqrt(each);
  const parts = Array.from({ length: tiles }, (_, t) => values.slice(t * each, (t + 1) * each));
  const whole = n > 1 ? (convention === 'smolvlm' ? parts.pop() : parts.shift()) : null;
  const mosaic = Array.from({ length: rows * side }, (_, y) => Array.from({ length: columns * side }, (_, x) =>
    parts[Math.floor(y / side) * columns + Math.floor(x / side)][(y % side) * side + (x % side)]));
  const square = whole && Array.from({ length: side }, (_, y) => whole.slice(y * side, (y + 1) * side));
  return { rows, columns, whole: square, tiles: mosaic };
}

function spots(n, cells) { // how much of each of `cells` spots in a row falls on each of `n` pixels
  const width = SPREAD / cells, tall = width * n * Math.sqrt(2 * Math.PI);
  return Array.from({ length: n }, (_, i) => Array.from({ length: cells }, (_, k) => Math.exp(-(((i + 0.5) / n - (k + 0.5) / cells) ** 2) / (2 * width ** 2)) / tall));
}

export function spread(heat, width, height) { // the sum of all spots, row by row
  const out = new Float64Array(width * height);
  for (const part of [heat.whole, heat.tiles].filter(Boolean)) {
    const down = spots(height, part.length), across = spots(width, part[0].length);
    const lines = part.map((row) => across.map((a) => a.reduce((sum, v, k) => sum + v * row[k], 0)));
    for (let y = 0; y < height; ++y) for (let x = 0; x < width; ++x) out[y * width + x] += down[y].reduce((sum, v, k) => sum + v * lines[k][x], 0);
  }
  return out;
}

// --- the page

const LARGEST = 2 ** 24; // pixels of a picture: what a phone's canvas holds
const STRENGTH = 0.6; // of the heat over the picture
const byId = (id) => document.getElementById(id);
const painted = () => new Promise((done) => setTimeout(done)); // the browser may draw

class Sheet { // the picture, and a pen
  constructor(changed) {
    this.canvas = byId('picture');
    this.context = this.canvas.getContext('2d', { willReadFrequently: true, alpha: false });
    this.changed = changed;
    this.pen = null;
    this.canvas.addEventListener('pointerdown', (e) => this.down(e));
    this.canvas.addEventListener('pointermove', (e) => e.buttons && this.last && this.line(this.place(e)));
    this.canvas.addEventListener('keydown', (e) => this.key(e));
    this.canvas.addEventListener('blur', () => { byId('nib').hidden = true; });
  }

  size(width, height) { [this.canvas.width, this.canvas.height, this.pen] = [width, height, null]; }

  clear(side) {
    this.size(side, side);
    this.context.fillStyle = '#101010'; // the ground of the drawn scenes
    this.context.fillRect(0, 0, side, side);
    this.changed();
  }

  show(picture) {
    if (picture.width * picture.height > LARGEST) throw new Error(`The picture has ${picture.width} x ${picture.height} pixels: give one of ${LARGEST.toLocaleString('en')} at most.`);
    this.size(picture.width, picture.height);
    this.context.fillStyle = '#fff'; // what is transparent shows white, as in training
    this.context.fillRect(0, 0, picture.width, picture.height);
    this.context.drawImage(picture, 0, 0);
    this.changed();
  }

  get picture() { // without the fourth byte
    const { width, height } = this.canvas, { data } = this.context.getImageData(0, 0, width, height), out = new Uint8Array(3 * width * height);
    for (let i = 0; i < width * height; ++i) for (let c = 0; c < 3; ++c) out[3 * i + c] = data[4 * i + c];
    return { width, height, data: out };
  }

  place(e) { return [(e.offsetX / this.canvas.clientWidth) * this.canvas.width, (e.offsetY / this.canvas.clientHeight) * this.canvas.height]; }

  down(e) {
    this.canvas.setPointerCapture(e.pointerId);
    this.last = this.place(e);
    this.line(this.last);
  }

  line([x, y]) {
    const c = this.context, wide = (byId('width').value * this.canvas.width) / 100;
    [c.strokeStyle, c.fillStyle, c.lineWidth] = [byId('colour').value, byId('colour').value, wide];
    c.beginPath();
    c.moveTo(...this.last);
    c.lineTo(x, y);
    c.stroke();
    c.beginPath();
    c.arc(x, y, wide / 2, 0, 2 * Math.PI); // the end is round, and a line without length is a dot
    c.fill();
    this.last = [x, y];
    this.changed();
  }

  key(e) {
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], ' ': [0, 0] }[e.key];
    if (!way || e.ctrlKey || e.altKey || e.metaKey) return;
    e.preventDefault();
    const { width, height } = this.canvas, step = width / 32, [x, y] = this.pen ?? [width / 2, height / 2];
    this.last = [x, y];
    this.pen = [Math.min(width, Math.max(0, x + way[0] * step)), Math.min(height, Math.max(0, y + way[1] * step))];
    if (e.shiftKey || e.key === ' ') this.line(this.pen);
    const nib = byId('nib');
    nib.hidden = false;
    [nib.style.left, nib.style.top] = [`${(100 * this.pen[0]) / width}%`, `${(100 * this.pen[1]) / height}%`];
  }
}

function drawHeat(heat, canvas, picture, colours) { // the picture in small, under the heat
  const { width, height } = picture, scale = 256 / Math.max(width, height), w = Math.max(1, Math.round(width * scale)), h = Math.max(1, Math.round(height * scale));
  const hot = spread(heat, w, h), low = hot.reduce((a, b) => Math.min(a, b)), range = Math.max(hot.reduce((a, b) => Math.max(a, b)) - low, 1e-12);
  [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext('2d', { willReadFrequently: true, alpha: false });
  context.drawImage(picture, 0, 0, w, h);
  const image = context.getImageData(0, 0, w, h);
  hot.forEach((v, i) => {
    const at = 6 * Math.min(255, Math.floor(((v - low) / range) * 256));
    for (let c = 0; c < 3; ++c) image.data[4 * i + c] += STRENGTH * (parseInt(colours.slice(at + 2 * c, at + 2 * c + 2), 16) - image.data[4 * i + c]);
  });
  context.putImageData(image, 0, 0);
}

async function decoded(blob) {
  try { return await createImageBitmap(blob, { colorSpaceConversion: 'none' }); }
  catch { throw new Error('This file is no picture that the browser can read.'); }
}

function button(parent, content, pressed) {
  const b = document.createElement('button');
  b.type = 'button';
  b.append(content);
  b.addEventListener('click', () => pressed(b));
  parent.append(b);
  return b;
}

async function start() {
  const tell = (text) => { byId('status').textContent = text; };
  const guarded = (task) => async (...args) => { try { return await task(...args); } catch (e) { tell(e.message); throw e; } };
  const bytes = async (path) => {
    const got = await fetch(path);
    if (!got.ok) throw new Error(`${path} cannot be loaded (${got.status}).`);
    return new Uint8Array(await got.arrayBuffer());
  };
  let model = null, busy = false, changes = 0, shown = Promise.resolve();
  const forget = () => { byId('answer').textContent = byId('figures').textContent = ''; byId('looked').hidden = true; };
  const pressed = (which) => document.querySelectorAll('#scenes button').forEach((b) => b.setAttribute('aria-pressed', b === which));
  const sheet = new Sheet(() => { ++changes; forget(); pressed(null); });
  const page = JSON.parse(new TextDecoder().decode(await bytes('page.json')));

  const ask = guarded(async () => {
    const question = strip(byId('question').value);
    if (!question) return tell('There is no question yet: write one, or press one of those below.');
    if (!model || busy) return;
    [busy, byId('ask').disabled] = [true, true];
    try {
      await shown.catch(() => {}); // the picture that was chosen last
      forget();
      const picture = sheet.picture, asked = changes, begun = performance.now();
      const heard = async (text) => {
        if (asked === changes) byId('answer').textContent = text;
        await painted();
        return asked === changes;
      };
      tell('Reading.');
      await painted();
      const got = await model.ask(picture, question, page.most_tokens, heard);
      tell('Ready.');
      if (asked !== changes) return; // an answer about a picture that is gone
      const { answer, said, heat } = got;
      byId('answer').textContent = answer;
      byId('figures').textContent = `${said.length} ${said.length === 1 ? 'token' : 'tokens'} in ${((performance.now() - begun) / 1000).toFixed(2)} seconds`;
      drawHeat(heat, byId('heat'), sheet.canvas, page.colours);
      byId('looked').hidden = false;
      dispatchEvent(new CustomEvent('answered', { detail: { answer, said, heat } }));
    } finally { [busy, byId('ask').disabled] = [false, false]; }
  });

  const inTurn = (task) => guarded((...args) => { shown = shown.catch(() => {}).then(() => task(...args)); return shown; });
  const open = inTurn(async (file) => { if (file) { sheet.show(await decoded(file)); tell(model ? 'Ready.' : 'Loading.'); } });
  const choose = inTurn(async (b, file) => { sheet.show(await decoded(new Blob([file]))); pressed(b); });
  byId('form').addEventListener('submit', (e) => { e.preventDefault(); ask(); });
  byId('file').addEventListener('change', (e) => open(e.target.files[0]));
  byId('clear').addEventListener('click', () => sheet.clear(page.sheet));
  addEventListener('paste', (e) => open([...e.clipboardData.files][0]));
  addEventListener('dragover', (e) => { e.preventDefault(); byId('board').classList.add('over'); });
  addEventListener('dragleave', () => byId('board').classList.remove('over'));
  addEventListener('drop', (e) => { e.preventDefault(); byId('board').classList.remove('over'); open(e.dataTransfer.files[0]); });
  for (const text of page.questions) button(byId('questions'), text, () => { byId('question').value = text; ask(); });
  byId('question').value = page.questions[0] ?? '';
  byId('about').textContent = page.about;

  const scenes = [];
  for (const { file, text } of page.scenes) {
    const image = new Image(), data = await bytes(file);
    [image.src, image.alt] = [file, text];
    scenes.push(button(byId('scenes'), image, (b) => choose(b, data)));
  }
  if (scenes.length) scenes[0].click(); else sheet.clear(page.sheet);

  tell('Loading the runtime.');
  const ort = await import('./runtime/ort.wasm.bundle.min.mjs');
  ort.env.wasm.numThreads = 1; // more would need headers that a plain file server does not send
  ort.env.wasm.wasmPaths = { wasm: new URL('./runtime/ort-wasm-simd-threaded.wasm', import.meta.url).href };
  model = await Model.load(ort, bytes, tell);
  byId('ask').disabled = false;
  tell('Ready.');
}

if (globalThis.document) start().catch((e) => { byId('status').textContent = `It does not work here: ${e.message}`; throw e; });
