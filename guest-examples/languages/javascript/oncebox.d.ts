import type { Failure as Answer, Message } from "oncebox:handler/types@0.1.0";
import type { Interval } from "oncebox:handler/sql@0.1.0";

export type { Message };

/** What goes into a statement as it is. Anything else through `typed`. */
export type Param = null | undefined | boolean | number | string | Uint8Array | Date | Typed | Param[];

/** What comes out of a row. `numeric` and `uuid` are texts; json is parsed. */
export type Column = null | boolean | number | string | Uint8Array | Date | Interval | Column[] | { [member: string]: unknown };

export declare class Typed {
  private constructor();
}

/** Thrown to answer something else than ok. */
export declare class Failure extends Error {
  constructor(tag: Answer["tag"], val: Answer["val"]);
  readonly failure: Answer;
}

/** A statement failed. The transaction is lost unless it happened after a savepoint. */
export declare class SqlError extends Error {
  /** PostgreSQL's code, such as `23505` for a key that is there already. */
  readonly sqlstate: string | null;
  readonly constraint: string | null;
}

/** This message can never succeed. */
export declare function reject(reason: string): never;
/** Run it again, after milliseconds or after the consumer's backoff. */
export declare function retry(afterMs?: number | null): never;
/** A person has to look at this message first. */
export declare function park(reason: string): never;

/** Run a statement for its effect; answers the number of rows it touched. */
export declare function execute(statement: string, ...params: Param[]): number;
/** Run a statement and read its rows, as objects by column name. */
export declare function query<Row = Record<string, Column>>(statement: string, ...params: Param[]): Row[];
/** A line into the host's log. */
export declare function log(...parts: unknown[]): void;
/** The payload as JSON. What is no JSON is rejected. */
export declare function parse(message: Message): unknown;
/** A value of a type that JavaScript has not: `typed("uuid", id)`, `typed("numeric", "1.50")`. */
export declare function typed(
  type: "int8" | "float8" | "numeric" | "uuid" | "json" | "date" | "time" | "timestamp" | "timestamptz" | "interval",
  value: string | number | Interval,
): Typed;
/** Makes the exported interface of a function. What it returns is kept as the message's result. */
export declare function handler(handle: (message: Message) => unknown): { handle(message: Message): string | null };
