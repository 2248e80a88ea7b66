// Script of explorer.html. `meta` has the offsets of each layer in `biases` and `keys`.
const $ = id => document.getElementById(id);
const meta = JSON.parse($('meta').textContent);
const [H, W] = meta.grid;
const PAGE = 16;       // heads in the overview at once
const state = {layer: 0, head: 0, channel: 0, first: 0, row: H >> 1, column: W >> 1,
               source: null, offset: null};
let biases, keys;

async function unpack(id) {
  const text = atob($(id).textContent.trim());
  const bytes = Uint8Array.from(text, c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).arrayBuffer();
}

const layerOf = i => meta.layers[i];
// w of source (r, c) for query (qr, qc), or null if the sum excludes it.
function biasAt(layer, head, qr, qc, r, c) {
  if (layer.causal && r * W + c > qr * W + qc) return null;
  if (layer.kernel) {
    const [kh, kw] = layer.kernel, i = r - qr + (kh >> 1), j = c - qc + (kw >> 1);
    const inside = i >= 0 && i < kh && j >= 0 && j < kw;
    if (!inside) return layer.connected ? 0 : null;
    return biases[layer.start + (head * kh + i) * kw + j];
  }
  const T = meta.prefix + H * W;
  const t = meta.prefix + qr * W + qc, s = meta.prefix + r * W + c;
  return biases[layer.start + (head * T + t) * T + s];
}

const measures = {more: Math.expm1, ratio: Math.exp, w: x => x};
const measured = w => measures[$('measure').value](w);
const neutral = () => ($('measure').value === 'ratio' ? 1 : 0);

// The largest distance from the neutral value in one or all layers.
function limitOf(index) {
  const layers = $('shared').value ? meta.layers : [layerOf(index)];
  const ends = layers.flatMap(layer => [layer.low, layer.high]);
  return Math.max(1e-9, ...ends.map(w => Math.abs(measured(w) - neutral())));
}
// Linear up to a distance of 1, logarithmic beyond, since exp(w) − 1 is bounded on one side only.
const bend = x => (Math.abs(x) <= 1 ? x : Math.sign(x) * (1 + Math.log(Math.abs(x))));
const rgb = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim()
  .split(' ').map(Number);
let palette;
function colour(position) {          // −1 … 1
  const t = Math.min(1, Math.abs(position)), end = position < 0 ? palette.less : palette.more;
  return palette.same.map((x, i) => x + t * (end[i] - x));
}
const shade = (value, limit) => colour(bend(value) / bend(limit));

// Paint rows × columns of colours into a rectangle; null is transparent.
function paint(context, x, y, width, height, rows, columns, colourAt) {
  const small = new OffscreenCanvas(columns, rows), inner = small.getContext('2d');
  const pixels = inner.createImageData(columns, rows);
  for (let r = 0; r < rows; r++) {
    for (let c = 0; c < columns; c++) {
      const value = colourAt(r, c), at = 4 * (r * columns + c);
      if (value) { pixels.data.set(value, at); pixels.data[at + 3] = 255; }
    }
  }
  inner.putImageData(pixels, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, x, y, width, height);
}
function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width, height].map(size => Math.round(size * ratio));
  Object.assign(canvas.style, {width: `${width}px`, height: `${height}px`});
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio);
  return context;
}
function outline(context, x, y, width, height, name = '--ink', thick = 2) {
  context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  context.lineWidth = thick;
  context.strokeRect(x + thick / 2, y + thick / 2, width - thick, height - thick);
}

// --- overview: a row per layer and a column per head, or with one head the layers in rows
const mostHeads = Math.max(...meta.layers.map(layer => layer.heads));
const oneHead = mostHeads === 1;
const depth = meta.layers.length;
const columnsShown = () => (oneHead ? Math.min(12, depth) : Math.min(PAGE, mostHeads));
const rowsShown = () => (oneHead ? Math.ceil(depth / columnsShown()) : depth);
const cell = oneHead ? {size: 56, gap: 12, left: 4, top: 22, below: 14}
                     : {size: 46, gap: 6, left: 64, top: 22, below: 0};
function itemAt(row, column) {
  const item = oneHead ? {layer: row * columnsShown() + column, head: 0}
                       : {layer: row, head: state.first + column};
  const layer = meta.layers[item.layer];
  return layer && item.head < layer.heads ? item : null;
}
function mapOf(item) {               // [rows, columns, w at]
  const layer = layerOf(item.layer);
  if (layer.kernel) {
    const [kh, kw] = layer.kernel;
    return [kh, kw, (i, j) => biases[layer.start + (item.head * kh + i) * kw + j]];
  }
  return [H, W, (r, c) => biasAt(layer, item.head, state.row, state.column, r, c)];
}
function drawMap(context, item, x, y, width, height) {
  const [rows, columns, at] = mapOf(item), limit = limitOf(item.layer);
  paint(context, x, y, width, height, rows, columns, (r, c) => {
    const w = at(r, c);
    return w === null ? null : shade(measured(w) - neutral(), limit);
  });
}
function drawOverview() {
  const step = cell.size + cell.gap;
  const context = prepare($('overview'), cell.left + columnsShown() * step,
                          cell.top + rowsShown() * (step + cell.below));
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--soft');
  context.font = '12px system-ui, sans-serif';
  for (let row = 0; row < rowsShown(); row++) {
    const y = cell.top + row * (step + cell.below);
    if (!oneHead) context.fillText(`layer ${layerOf(row).number}`, 4, y + cell.size / 2 + 4);
    for (let column = 0; column < columnsShown(); column++) {
      const item = itemAt(row, column), x = cell.left + column * step;
      if (!item) continue;
      if (oneHead) context.fillText(`layer ${layerOf(item.layer).number}`, x, y - 5);
      else if (!row) context.fillText(`${item.head}`, x + cell.size / 2 - 6, cell.top - 7);
      drawMap(context, item, x, y, cell.size, cell.size);
      const chosen = item.layer === state.layer && item.head === state.head;
      if (chosen) outline(context, x - 3, y - 3, cell.size + 6, cell.size + 6, '--accent', 3);
    }
  }
  const last = Math.min(mostHeads, state.first + PAGE) - 1;
  for (const id of ['before', 'after']) $(id).hidden = mostHeads <= PAGE;
  $('page').textContent = oneHead ? 'one bias for all channels'
    : `heads ${state.first} to ${last} of ${mostHeads}`;
}

// --- grid of tokens and kernel
// Three maps of an image fill the width of the page, on a phone one.
const room = innerWidth - 84;
const widest = Math.min(room, Math.max(392, Math.floor((Math.min(innerWidth, 1440) - 150) / 3)));
const tileOf = cells => Math.max(1, Math.min(6, Math.floor(room / cells)),
                                 Math.min(64, Math.floor(widest / cells)));
const tile = tileOf(Math.max(H, W));
function drawQuery() {
  const context = prepare($('query'), W * tile, H * tile);
  const layer = layerOf(state.layer), limit = limitOf(state.layer);
  paint(context, 0, 0, W * tile, H * tile, H, W, (r, c) => {
    const w = biasAt(layer, state.head, state.row, state.column, r, c);
    return w === null ? null : shade(measured(w) - neutral(), limit);
  });
  outline(context, 0, 0, W * tile, H * tile, '--line', 1);
  outline(context, state.column * tile, state.row * tile, tile, tile, '--ink', 2);
  if (state.source) {
    outline(context, state.source[1] * tile, state.source[0] * tile, tile, tile, '--accent', 2);
  }
}
const kernelTile = layer => tileOf(Math.max(...layer.kernel));
function drawKernel() {
  const layer = layerOf(state.layer);
  $('kernel-box').hidden = !layer.kernel;
  if (!layer.kernel) return;
  const [kh, kw] = layer.kernel, size = kernelTile(layer);
  const context = prepare($('kernel'), kw * size, kh * size);
  drawMap(context, state, 0, 0, kw * size, kh * size);
  outline(context, 0, 0, kw * size, kh * size, '--line', 1);
  outline(context, (kw >> 1) * size, (kh >> 1) * size, size, size, '--ink', 1);
  if (state.offset) {
    outline(context, state.offset[1] * size, state.offset[0] * size, size, size, '--accent', 2);
  }
}

// --- images: e^k over its mean, and the weight of each source for the query
function keyMap(image) {
  const {keyChannels, heads} = layerOf(state.layer), T = meta.prefix + H * W;
  if (!image.keys[state.layer]) return null;
  const {start, low, step} = image.keys[state.layer];
  const channel = keyChannels === heads ? state.head : Math.min(state.channel, keyChannels - 1);
  const from = start + channel * T;
  return Array.from(keys.subarray(from, from + T), q => low + step * q);
}
function keyRatios(k) {              // e^k over its mean on the grid
  const grid = k.slice(meta.prefix), most = Math.max(...grid);
  const powers = grid.map(x => Math.exp(x - most));
  const mean = powers.reduce((a, b) => a + b) / powers.length;
  return powers.map(x => x / mean);
}
function shares(k) {                 // W e^k / Σ W e^k over all sources, including class tokens
  const layer = layerOf(state.layer), T = meta.prefix + H * W;
  const t = meta.prefix + state.row * W + state.column;
  const logits = k.map((x, s) => {
    if (s < meta.prefix) return x + biases[layer.start + (state.head * T + t) * T + s];
    const r = Math.floor((s - meta.prefix) / W), c = (s - meta.prefix) % W;
    const w = biasAt(layer, state.head, state.row, state.column, r, c);
    return w === null ? -Infinity : x + w;
  });
  const most = Math.max(...logits), powers = logits.map(x => Math.exp(x - most));
  const sum = powers.reduce((a, b) => a + b);
  return powers.slice(meta.prefix).map(x => x / sum);
}
function drawImages() {
  meta.images.forEach((image, i) => {
    const k = keyMap(image);
    $(`image-${i}`).hidden = !k;
    [image.ratios, image.shares] = k ? [keyRatios(k), shares(k)] : [null, null];
    if (!k) return;
    const width = W * tile, height = H * tile;
    const picture = prepare($(`picture-${i}`), width, height);
    picture.imageSmoothingEnabled = false;
    picture.drawImage(image.element, 0, 0, width, height);
    outline(picture, state.column * tile, state.row * tile, tile, tile, '--accent', 2);
    const most = Math.max(1e-9, ...image.ratios.map(x => Math.abs(Math.log(x))));
    paint(prepare($(`keymap-${i}`), width, height), 0, 0, width, height, H, W,
          (r, c) => colour(Math.log(image.ratios[r * W + c]) / most));
    const top = Math.max(1e-9, ...image.shares);
    const context = prepare($(`share-${i}`), width, height);
    paint(context, 0, 0, width, height, H, W, (r, c) => colour(image.shares[r * W + c] / top));
    outline(context, state.column * tile, state.row * tile, tile, tile, '--ink', 1);
    legend($(`keymap-${i}`), -1, Math.exp(-most).toPrecision(3),
           `${Math.exp(most).toPrecision(3)} times the mean`);
    legend($(`share-${i}`), 0, '0', percent(top));
  });
}
// A colour scale below a canvas; `from` is the position of its left end, −1 or 0.
function legend(canvas, from, low, high) {
  const [left, ramp, right] = canvas.nextElementSibling.children;
  left.textContent = low;
  right.textContent = high;
  ramp.style.background = gradient(from);
}
function gradient(from) {
  const stops = [...Array(21).keys()].map(i => colour(from + (1 - from) * i / 20))
    .map(c => `rgb(${c.join(' ')})`);
  return `linear-gradient(to right, ${stops.join(',')})`;
}

// --- readout
const number = x => (x === null ? 'not summed over' : Number(x.toPrecision(7)).toString());
const say = text => { $('readout').textContent = text; };
const percent = x => `${(100 * x).toPrecision(4)} %`;
const sign = x => (x > 0 ? `+${x}` : `${x}`);
const chosenHead = () => `layer ${layerOf(state.layer).number}, head ${state.head}`;
function saySource() {
  const [r, c] = state.source ?? [state.row, state.column];
  const w = biasAt(layerOf(state.layer), state.head, state.row, state.column, r, c);
  const values = w === null ? 'not summed over'
    : `w = ${number(w)}, exp(w) = ${number(Math.exp(w))}`;
  const keyed = meta.images.filter(image => image.ratios).map(image => `; ${image.name}: ` +
    `key ${number(image.ratios[r * W + c])}, share ${percent(image.shares[r * W + c])}`);
  say(`${chosenHead()}, query (${state.row}, ${state.column}), source (${r}, ${c}): ` +
      values + keyed.join(''));
}
function sayOffset() {
  const layer = layerOf(state.layer), [kh, kw] = layer.kernel;
  const [i, j] = state.offset ?? [kh >> 1, kw >> 1];
  const w = biases[layer.start + (state.head * kh + i) * kw + j];
  say(`${chosenHead()}, offset (${sign(i - (kh >> 1))}, ${sign(j - (kw >> 1))}): ` +
      `w = ${number(w)}, exp(w) = ${number(Math.exp(w))}`);
}
function drawScale() {
  const limit = limitOf(state.layer);
  const from = $('measure').value === 'w' ? -limit : Math.max(-limit, -1);
  const left = bend(from) / bend(limit);
  document.querySelector('#scale .ramp').style.background = gradient(left);
  const name = $('measure').selectedOptions[0].textContent;
  $('low').textContent = `${name}: ${(neutral() + from).toPrecision(3)}`;
  $('high').textContent = `${(neutral() + limit).toPrecision(3)}, middle ${neutral()}; ` +
    'linear to a distance of 1, logarithmic beyond';
}

function draw() {
  palette = {less: rgb('--less'), same: rgb('--same'), more: rgb('--more')};
  const layer = layerOf(state.layer);
  state.head = Math.min(state.head, layer.heads - 1);
  $('layer').value = state.layer;
  $('head').value = state.head;
  $('head').max = layer.heads - 1;
  $('channel').max = layer.keyChannels - 1;
  $('channel-label').hidden = !meta.images.length || layer.keyChannels === layer.heads;
  drawScale(); drawOverview(); drawQuery(); drawKernel(); drawImages();
}

// --- events
const clamp = (x, most) => Math.max(0, Math.min(most, x));
const arrows = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
function choose(layer, head) {
  state.layer = clamp(layer, meta.layers.length - 1);
  state.head = clamp(head, layerOf(state.layer).heads - 1);
  if (state.head < state.first || state.head >= state.first + PAGE) {
    state.first = Math.floor(state.head / PAGE) * PAGE;
  }
  state.offset = null;
  draw();
  saySource();
}
function place(canvas, event, size) {
  const box = canvas.getBoundingClientRect(), {width, height} = canvas.style;
  return [(event.clientY - box.top) * parseFloat(height) / box.height,
          (event.clientX - box.left) * parseFloat(width) / box.width].map(x => Math.floor(x / size));
}
function onArrows(id, move) {
  $(id).addEventListener('keydown', event => {
    if (!arrows[event.key]) return;
    event.preventDefault();
    move(...arrows[event.key], event.shiftKey);
  });
}
function overviewItem(event) {
  const step = cell.size + cell.gap, box = $('overview').getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left - cell.left) / step);
  const row = Math.floor((event.clientY - box.top - cell.top) / (step + cell.below));
  return row >= 0 && column >= 0 && column < columnsShown() ? itemAt(row, column) : null;
}
function listen() {
  $('overview').addEventListener('click', event => {
    const item = overviewItem(event);
    if (item) choose(item.layer, item.head);
  });
  onArrows('overview', (down, right) => (oneHead
    ? choose(state.layer + right + down * columnsShown(), 0)
    : choose(state.layer + down, state.head + right)));
  $('query').addEventListener('click', event => {
    [state.row, state.column] = place($('query'), event, tile);
    state.row = clamp(state.row, H - 1); state.column = clamp(state.column, W - 1);
    state.source = null;
    draw(); saySource();
  });
  $('query').addEventListener('pointermove', event => {
    const [r, c] = place($('query'), event, tile);
    state.source = [clamp(r, H - 1), clamp(c, W - 1)];
    drawQuery(); saySource();
  });
  onArrows('query', (down, right, shift) => {
    if (shift) {
      const [r, c] = state.source ?? [state.row, state.column];
      state.source = [clamp(r + down, H - 1), clamp(c + right, W - 1)];
      drawQuery();
    } else {
      state.row = clamp(state.row + down, H - 1);
      state.column = clamp(state.column + right, W - 1);
      state.source = null;
      draw();
    }
    saySource();
  });
  const setOffset = (i, j) => {
    const [kh, kw] = layerOf(state.layer).kernel;
    state.offset = [clamp(i, kh - 1), clamp(j, kw - 1)];
    drawKernel(); sayOffset();
  };
  $('kernel').addEventListener('pointermove', event =>
    setOffset(...place($('kernel'), event, kernelTile(layerOf(state.layer)))));
  onArrows('kernel', (down, right) => {
    const [kh, kw] = layerOf(state.layer).kernel, [i, j] = state.offset ?? [kh >> 1, kw >> 1];
    setOffset(i + down, j + right);
  });
  $('layer').addEventListener('change', () => choose(+$('layer').value, state.head));
  $('head').addEventListener('change', () => choose(state.layer, Math.floor(+$('head').value) || 0));
  $('channel').addEventListener('change', () => {
    const last = layerOf(state.layer).keyChannels - 1;
    $('channel').value = state.channel = clamp(Math.floor(+$('channel').value) || 0, last);
    draw();
  });
  for (const id of ['measure', 'shared']) $(id).addEventListener('change', draw);
  for (const [id, by] of [['before', -PAGE], ['after', PAGE]]) $(id).onclick = () => turn(by);
  $('theme').addEventListener('click', () => setTheme($('theme').textContent));
  meta.images.forEach((image, i) => {
    for (const [id, name] of [['keymap', 'ratios'], ['share', 'shares']]) {
      $(`${id}-${i}`).addEventListener('pointermove', event => {
        const [row, column] = place($(`${id}-${i}`), event, tile);
        const r = clamp(row, H - 1), c = clamp(column, W - 1), value = image[name][r * W + c];
        say(`${image.name}, ${chosenHead()}, source (${r}, ${c}): ` + (name === 'ratios'
          ? `exp(k) / mean = ${number(value)}` : `${percent(value)} of the sum`));
      });
    }
  });
}
function turn(by) {
  const last = Math.floor((mostHeads - 1) / PAGE) * PAGE;
  state.first = Math.max(0, Math.min(last, state.first + by));
  drawOverview();
}
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $('theme').textContent = theme === 'dark' ? 'light' : 'dark';
  if (biases) draw();
}
async function start() {
  setTheme(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  document.title = $('title').textContent = meta.title;
  $('about').textContent = meta.about;
  meta.layers.forEach((layer, i) => $('layer').append(new Option(`${layer.number}: ${layer.name}`, i)));
  [biases, keys] = [new Float32Array(await unpack('biases')), new Uint16Array(await unpack('keys'))];
  for (const [i, image] of meta.images.entries()) {
    const section = document.createElement('section');
    section.id = `image-${i}`;
    const title = Object.assign(document.createElement('h2'), {textContent: image.name});
    const row = Object.assign(document.createElement('div'), {className: 'row'});
    for (const [id, text] of [['picture', 'the image at the input of the model'],
                              ['keymap', 'key: exp(k) over its mean'],
                              ['share', 'share of each source in the sum of the query']]) {
      const figure = document.createElement('figure'), caption = document.createElement('figcaption');
      const canvas = document.createElement('canvas');
      Object.assign(canvas, {id: `${id}-${i}`, role: 'img', ariaLabel: `${image.name}: ${text}`});
      caption.textContent = text;
      const scale = Object.assign(document.createElement('div'), {className: 'scale'});
      scale.append(...['', 'ramp', ''].map(className =>
        Object.assign(document.createElement('span'), {className})));
      figure.append(canvas, scale, caption);
      scale.hidden = id === 'picture';
      row.append(figure);
    }
    section.append(title, row);
    $('images').append(section);
    image.element = new Image();
    image.element.src = image.data;
    await image.element.decode();
  }
  listen();
  draw();
  saySource();
  document.documentElement.dataset.ready = 'yes';
}
start();
