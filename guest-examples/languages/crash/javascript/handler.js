// A handler with a bug, for the tests: what it says must reach whoever looks at the message.
import { execute, handler, parse } from "./oncebox.js";

export const incomingHandler = handler((message) => {
  const order = parse(message);
  execute("INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)", order.order_id, order.account, order.amount, order.note);
  return order.lines();
});
