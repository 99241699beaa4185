// The contract in `wit/`, as this engine shows it: variants are `{ tag, val }`, options are
// null, a failed `result` is thrown. 64 bit integers are numbers, so beyond 2^53 they lose
// their last digits: cast such columns to text in SQL.

declare module "oncebox:handler/types@0.1.0" {
  export interface Message {
    /** Identity for deduplication. */
    id: string;
    /** Where the message comes from: the CloudEvents `source`, or the topic. */
    source: string;
    eventType: string;
    key: Uint8Array | null;
    /** Milliseconds since the Unix epoch. */
    timestamp: number;
    headers: [name: string, value: Uint8Array][];
    contentType: string | null;
    /** Null is a tombstone. */
    payload: Uint8Array | null;
  }

  export type Failure =
    | { tag: "retry"; val: number | null }
    | { tag: "reject"; val: string }
    | { tag: "park"; val: string }
    | { tag: "other"; val: string };
}

declare module "oncebox:handler/sql@0.1.0" {
  export interface Interval {
    months: number;
    days: number;
    microseconds: number;
  }

  export type Element =
    | { tag: "null" }
    | { tag: "boolean"; val: boolean }
    | { tag: "int2" | "int4" | "int8" | "float4" | "float8"; val: number }
    | { tag: "numeric" | "text" | "uuid" | "json"; val: string }
    | { tag: "bytea"; val: Uint8Array }
    | { tag: "date" | "time" | "timestamp" | "timestamptz"; val: number }
    | { tag: "interval"; val: Interval }
    | { tag: "other"; val: { typeName: string; text: string } };

  export type Value = Element | { tag: "array"; val: Element[] };

  export interface ResultSet {
    columns: { name: string; typeName: string }[];
    rows: Value[][];
  }

  /** Thrown by every function of this module. */
  export type SqlError =
    | { tag: "database"; val: { sqlstate: string; message: string; detail: string | null; constraint: string | null } }
    | { tag: "refused" | "unsupported" | "limit"; val: string };

  /** A point to which a handler can return, so that it survives a statement that failed. */
  export class Savepoint {
    static open(): Savepoint;
    rollback(): void;
    release(): void;
  }

  const sql: {
    query(statement: string, params: Value[]): ResultSet;
    execute(statement: string, params: Value[]): number;
    Savepoint: typeof Savepoint;
  };
  export default sql;
}

declare module "oncebox:handler/log@0.1.0" {
  export function log(level: "trace" | "debug" | "info" | "warn" | "error", message: string): void;
}

declare module "oncebox:handler/config@0.1.0" {
  export function get(key: string): string | null;
  export function getAll(): [key: string, value: string][];
}

declare module "oncebox:handler/context@0.1.0" {
  export function tenant(): string;
  export function consumer(): string;
  export function topic(): string;
  export function partition(): number;
  export function offset(): number;
  /** Which run of this message this is, from 1. */
  export function attempt(): number;
  export function delivery(): "live" | "retry" | "replay" | "shadow";
  export function eventVersion(): string | null;
  export function traceParent(): string | null;
  /** Milliseconds left until the host stops this call. */
  export function deadlineLeftMs(): number;
}
