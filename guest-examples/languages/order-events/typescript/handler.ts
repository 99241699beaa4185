// Tells others of an order, and reminds itself of one that is not paid: outgoing messages, which
// are sent after the commit of the message that causes them, or not at all.
import { get } from "oncebox:handler/config@0.1.0";

import { cancel, emit } from "./emit.js";
import { execute, handler, parse, reject } from "./oncebox.js";

interface Order {
  order_id: string;
  amount: number;
}

export const incomingHandler = handler((message) => {
  const { order_id, amount } = order(parse(message));
  switch (message.eventType) {
    case "order.placed":
      return place(order_id, amount);
    case "order.paid":
      return pay(order_id);
    case "order.reminder":
      return remind(order_id);
    default:
      reject(`no event of an order: \`${message.eventType}\``);
  }
});

// Stores the order, confirms it to everyone, and sends a reminder to this consumer itself.
function place(order_id: string, amount: number): void {
  execute("INSERT INTO purchases (order_id, amount) VALUES ($1, $2)", order_id, amount);
  emit(setting("confirm_to", "kafka:order-events"), "order.confirmed", { order_id, amount }, { key: order_id });
  const afterMs = Number(setting("remind_after_s", "3600")) * 1000;
  if (!Number.isSafeInteger(afterMs) || afterMs < 0) throw new Error("`remind_after_s` must be a number of seconds");
  const options = { key: order_id, afterMs, cancelToken: token(order_id) };
  emit(setting("remind_to", "inbox:orders"), "order.reminder", { order_id }, options);
}

// Withdraws the reminder. It may be on its way already, so `remind` looks at the order again.
function pay(order_id: string): void {
  const paid = execute("UPDATE purchases SET is_paid = true WHERE order_id = $1", order_id);
  if (paid === 0) reject(`no order ${order_id}`);
  cancel(token(order_id));
}

function remind(order_id: string): void {
  execute("UPDATE purchases SET reminders = reminders + 1 WHERE order_id = $1 AND NOT is_paid", order_id);
}

// Types end at the edge of the program: a member that is missing or of another type can never
// succeed, however often it is tried.
function order(payload: unknown): Order {
  const { order_id, amount = 0 } = (payload ?? {}) as Partial<Order>;
  if (typeof order_id !== "string") reject("malformed payload: `order_id` must be a text");
  if (typeof amount !== "number" || !Number.isSafeInteger(amount)) reject("malformed payload: `amount` must be an integer below 2^53");
  return { order_id, amount };
}

function setting(name: string, otherwise: string): string {
  return get(name) ?? otherwise;
}

// One reminder of an order can be withdrawn by its name.
function token(order_id: string): string {
  return `reminder:${order_id}`;
}
