// What a handler needs beside the contract: native values instead of variants, exceptions
// instead of `result`, and a failure that leaves its text. Yours to change.
import sql from "oncebox:handler/sql@0.1.0";
import { log as write } from "oncebox:handler/log@0.1.0";

/** Thrown to answer something else than ok. `failure` is the contract's variant. */
export class Failure extends Error {
  constructor(tag, val) {
    super(`${tag}: ${val}`);
    this.failure = { tag, val };
  }
}

/** This message can never succeed. */
export function reject(reason) {
  throw new Failure("reject", reason);
}

/** Run it again, after milliseconds or after the consumer's backoff. */
export function retry(afterMs = null) {
  throw new Failure("retry", afterMs);
}

/** A person has to look at this message first. */
export function park(reason) {
  throw new Failure("park", reason);
}

/** A statement failed. The transaction is lost unless it happened after a savepoint. */
export class SqlError extends Error {
  constructor({ tag, val }) {
    super(tag === "database" ? `${val.sqlstate}: ${val.message}` : `${tag}: ${val}`);
    this.name = "SqlError";
    /** PostgreSQL's code, such as `23505` for a key that is there already. */
    this.sqlstate = tag === "database" ? val.sqlstate : null;
    this.constraint = tag === "database" ? val.constraint : null;
  }
}

/** Run a statement for its effect; answers the number of rows it touched. */
export function execute(statement, ...params) {
  return call(() => Number(sql.execute(statement, params.map(toValue))));
}

/** Run a statement and read its rows, as objects by column name. */
export function query(statement, ...params) {
  const { columns, rows } = call(() => sql.query(statement, params.map(toValue)));
  return rows.map((row) => Object.fromEntries(row.map((value, i) => [columns[i].name, fromValue(value)])));
}

/** A line into the host's log. */
export function log(...parts) {
  write("info", parts.map(String).join(" "));
}

/** The payload as JSON. What is no JSON can never succeed. */
export function parse(message) {
  if (message.payload == null) reject("the message has no payload");
  try {
    return JSON.parse(text(message.payload));
  } catch (error) {
    reject(`malformed payload: ${error.message}`);
  }
}

/** A value of a type that JavaScript has not: `typed("uuid", id)`, `typed("numeric", "1.50")`. */
export function typed(type, value) {
  return new Typed(type, value);
}

/**
 * Makes the exported interface of a function. What it returns is kept as the message's result.
 * An exception that is no answer is logged with its stack, and the message is tried again.
 */
export function handler(handle) {
  return {
    handle(message) {
      try {
        const result = handle(message);
        return result === undefined ? null : JSON.stringify(result);
      } catch (error) {
        if (error instanceof Failure) throw error.failure;
        const stack = (error?.stack ?? "").trim();
        write("error", `${error}\n${stack}`.trim());
        throw { tag: "other", val: `${error} ${stack.split("\n")[0].trim()}`.trim() };
      }
    },
  };
}

class Typed {
  constructor(tag, val) {
    this.tag = tag;
    this.val = val;
  }
}

function call(statement) {
  try {
    return statement();
  } catch (error) {
    throw error?.tag ? new SqlError(error) : error;
  }
}

function toValue(value) {
  if (value instanceof Typed) return { tag: value.tag, val: value.val };
  if (value == null) return { tag: "null" };
  if (Array.isArray(value)) return { tag: "array", val: value.map(toValue) };
  if (value instanceof Uint8Array) return { tag: "bytea", val: value };
  if (value instanceof Date) return { tag: "timestamptz", val: value.getTime() * 1000 };
  switch (typeof value) {
    case "string":
      return { tag: "text", val: value };
    case "boolean":
      return { tag: "boolean", val: value };
    case "number":
      // Beyond 2^53 a number is no longer the one that was meant.
      if (Number.isSafeInteger(value)) return { tag: "int8", val: value };
      if (!Number.isInteger(value)) return { tag: "float8", val: value };
  }
  throw new TypeError(`no parameter: ${typeof value} ${String(value)}; use typed(type, value)`);
}

function fromValue({ tag, val }) {
  switch (tag) {
    case "null":
      return null;
    case "json":
      return JSON.parse(val);
    case "timestamptz":
      return new Date(val / 1000);
    case "array":
      return val.map(fromValue);
    default:
      return val;
  }
}

/** UTF-8 to a string. The engine has no TextDecoder; `decodeURIComponent` refuses what is malformed. */
function text(bytes) {
  let encoded = "";
  for (let i = 0; i < bytes.length; i++) encoded += HEX[bytes[i]];
  return decodeURIComponent(encoded);
}

const HEX = Array.from({ length: 256 }, (_, byte) => "%" + byte.toString(16).padStart(2, "0"));
