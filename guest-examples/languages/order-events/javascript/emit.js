// Messages to others, which the host sends after the commit. Yours to change.
//
// A component that imports this needs the world of version 0.2 of the contract, and its deployment
// needs the grant for it: `oncebox deploy --grant emit`.
import { cancel as withdraw, emit as send } from "oncebox:handler/emit@0.2.0";

/** A message cannot be sent or withdrawn. It fails the message that is handled. */
export class EmitError extends Error {
  constructor({ tag, val }) {
    super(`${tag}: ${val}`);
    this.name = "EmitError";
    /** `refused`: running it again cannot help; `limit`: a cap was reached; `database`: PostgreSQL's error. */
    this.reason = tag;
  }
}

/**
 * Sends a message after the commit, if the message that is handled commits; answers its id. The
 * payload goes as JSON; undefined is a message without one.
 */
export function emit(destination, eventType, payload, { key, afterMs, at, cancelToken, headers = [] } = {}) {
  const json = JSON.stringify(payload);
  const message = {
    eventType,
    contentType: json === undefined ? null : "application/json",
    headers,
    payload: json === undefined ? null : bytes(json),
  };
  const options = { key: key == null ? null : bytes(key), due: due(afterMs, at), cancelToken: cancelToken ?? null, cause: null };
  return call(() => send(destination, message, options));
}

/** Withdraws what this consumer sent with the token and no relay has begun to send. True if there was any. */
export function cancel(token) {
  return call(() => withdraw(token));
}

function due(afterMs, at) {
  if (afterMs != null) return { tag: "after", val: afterMs };
  if (at != null) return { tag: "at", val: at.getTime() };
  return { tag: "now" };
}

function call(request) {
  try {
    return request();
  } catch (error) {
    throw error?.tag ? new EmitError(error) : error;
  }
}

/** A string to UTF-8. The engine has no TextEncoder; `encodeURIComponent` refuses half a character. */
function bytes(text) {
  const encoded = encodeURIComponent(text);
  const octets = [];
  for (let i = 0; i < encoded.length; i++) {
    const isEscape = encoded[i] === "%";
    octets.push(isEscape ? parseInt(encoded.slice(i + 1, i + 3), 16) : encoded.charCodeAt(i));
    if (isEscape) i += 2;
  }
  return new Uint8Array(octets);
}
