// The page's numbers: base64 of deflated bytes, differences of neighbours, lowest bytes first (see packing.py).

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function integers(node) {
  const bytes = await inflate(node.z);
  const count = node.n;
  const made = new Float64Array(count);
  let sum = 0;
  for (let i = 0; i < count; i += 1) {
    let low = 0;
    let high = 0;
    for (let plane = 3; plane >= 0; plane -= 1) {
      low = low * 256 + bytes[plane * count + i];
      high = high * 256 + bytes[(plane + 4) * count + i];
    }
    sum += (high | 0) * 4294967296 + low;
    made[i] = sum;
  }
  return made;
}

// Replaces every packed value in a document by what it holds.
async function unpack(node) {
  if (Array.isArray(node)) return Promise.all(node.map(unpack));
  if (node === null || typeof node !== "object") return node;
  if (typeof node.z === "string") return integers(node);
  if (typeof node.t === "string") return JSON.parse(new TextDecoder().decode(await inflate(node.t)));
  const pairs = await Promise.all(Object.entries(node).map(async ([key, value]) => [key, await unpack(value)]));
  return Object.fromEntries(pairs);
}
