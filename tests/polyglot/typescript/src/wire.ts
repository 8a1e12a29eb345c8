// Token ids, logprobs and masks travel as packed little-endian bytes.

export function packIds(ids: readonly number[]): Buffer {
  const bytes = Buffer.alloc(4 * ids.length);
  ids.forEach((id, i) => bytes.writeInt32LE(id, 4 * i));
  return bytes;
}

export function unpackIds(bytes: Uint8Array): number[] {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: bytes.byteLength / 4 }, (_, i) => view.getInt32(4 * i, true));
}

export function unpackFloats(bytes: Uint8Array): number[] {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Array.from({ length: bytes.byteLength / 4 }, (_, i) => view.getFloat32(4 * i, true));
}
