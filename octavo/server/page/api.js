// Requests to the server that the page comes from. The key travels in a header alone.
import { EventReader } from "./protocol.js";

const KEY = "octavo-api-key";
const root = new URL("../", import.meta.url);
let askForKey = async () => false;

export const keyOf = () => sessionStorage.getItem(KEY) ?? "";
export const keepKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const urlOf = (path) => new URL(path, root).href;

/** Set what asks for a key; it returns whether there is another one now. */
export const onMissingKey = (ask) => (askForKey = ask);

/** What the server refused: its message, and the field that is meant. */
export class ApiFailure extends Error {
  constructor(status, error) {
    super(error?.message ?? `the server replied with status ${status}`);
    Object.assign(this, { status, field: error?.param ?? "", code: error?.code ?? "" });
  }
}

/** Return a response that succeeded. Throws ApiFailure; asks for a key where one is needed. */
export async function ask(path, { body, signal } = {}) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(keyOf() && { Authorization: `Bearer ${keyOf()}` }) };
  const options = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store" };
  const response = await fetch(urlOf(path), options).catch((error) => {
    throw error instanceof TypeError ? new Error("the server does not respond; is it running?", { cause: error }) : error;
  });
  if (response.ok) return response;
  const failure = new ApiFailure(response.status, (await response.json().catch(() => null))?.error);
  if (response.status === 401 && (await askForKey(failure))) return ask(path, { body, signal });
  throw failure;
}

export const askJson = async (path, options) => (await ask(path, options)).json();

const BROKEN = "the connection to the server was lost before the end";

/** Yield the events of a stream as objects. Throws ApiFailure, also for an error within the stream, and an Error for one that is
 * cut; `isEndless`: one that the server may end at any time, without [DONE]. */
export async function* events(path, { isEndless = false, ...options }) {
  const response = await ask(path, options);
  const reader = new EventReader();
  const pieces = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = () =>
    pieces.read().catch((error) => {
      throw error instanceof TypeError ? new Error(BROKEN, { cause: error }) : error;
    });
  for (let piece = await read(); !piece.done; piece = await read()) {
    for (const data of reader.feed(piece.value)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiFailure(event.error.status ?? 500, event.error);
      yield event;
    }
  }
  if (!isEndless) throw new Error(BROKEN);
}
