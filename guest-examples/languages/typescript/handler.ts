// Books an order once. Both statements run in the host's open transaction, which also marks
// the message as done: they are committed with it or not at all.
import { execute, handler, parse, reject } from "./oncebox.js";

interface Order {
  order_id: string;
  account: number;
  amount: number;
  note: string;
}

export const incomingHandler = handler((message) => {
  const { order_id, account, amount, note } = order(parse(message));
  execute("INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)", order_id, account, amount, note);
  const touched = execute("UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1", account, amount);
  if (touched === 0) reject(`no account ${account}`);
});

// Types end at the edge of the program: a member that is missing or of another type can never
// succeed, however often it is tried.
function order(payload: unknown): Order {
  const { order_id, account, amount, note } = (payload ?? {}) as Partial<Order>;
  if (typeof order_id !== "string") reject("malformed payload: `order_id` must be a text");
  if (typeof account !== "number" || account !== (account | 0)) reject("malformed payload: `account` must be a 32 bit integer");
  if (typeof amount !== "number" || !Number.isSafeInteger(amount)) reject("malformed payload: `amount` must be an integer below 2^53");
  if (typeof note !== "string") reject("malformed payload: `note` must be a text");
  return { order_id, account, amount, note };
}
