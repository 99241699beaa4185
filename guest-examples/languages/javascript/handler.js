// Books an order once. Both statements run in the host's open transaction, which also marks
// the message as done: they are committed with it or not at all.
import { execute, handler, parse, reject } from "./oncebox.js";

export const incomingHandler = handler((message) => {
  const { id, account, amount, note } = order(parse(message));
  execute("INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)", id, account, amount, note);
  const touched = execute("UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1", account, amount);
  if (touched === 0) reject(`no account ${account}`);
});

// A member that is missing or of another type can never succeed, however often it is tried.
function order(payload) {
  const { order_id: id, account, amount, note } = payload ?? {};
  if (typeof id !== "string") reject("malformed payload: `order_id` must be a text");
  if (account !== (account | 0)) reject("malformed payload: `account` must be a 32 bit integer");
  if (!Number.isSafeInteger(amount)) reject("malformed payload: `amount` must be an integer below 2^53");
  if (typeof note !== "string") reject("malformed payload: `note` must be a text");
  return { id, account, amount, note };
}
