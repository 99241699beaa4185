/** How a message is sent. */
export interface Options {
  /** Messages of one destination and key are sent in the order of their due times, then of their calls. */
  key?: string | null;
  /** Milliseconds from the beginning of the transaction; after the commit, where neither this nor `at` says otherwise. */
  afterMs?: number | null;
  /** A time by the database's clock. */
  at?: Date | null;
  /** Names the message for `cancel`. */
  cancelToken?: string | null;
  /** The host adds those of CloudEvents itself. */
  headers?: [name: string, value: Uint8Array][];
}

/** A message cannot be sent or withdrawn. It fails the message that is handled. */
export declare class EmitError extends Error {
  /** `refused`: running it again cannot help; `limit`: a cap was reached; `database`: PostgreSQL's error. */
  readonly reason: "refused" | "limit" | "database";
}

/**
 * Sends a message after the commit, if the message that is handled commits; answers its id. The
 * destination is `kafka:` and a topic, or `inbox:` and a consumer of the tenant. The payload goes as
 * JSON; undefined is a message without one.
 */
export declare function emit(destination: string, eventType: string, payload: unknown, options?: Options): string;
/** Withdraws what this consumer sent with the token and no relay has begun to send. True if there was any. */
export declare function cancel(token: string): boolean;
