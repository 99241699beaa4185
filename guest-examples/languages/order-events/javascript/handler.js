// Tells others of an order, and reminds itself of one that is not paid: outgoing messages, which
// are sent after the commit of the message that causes them, or not at all.
import { get } from "oncebox:handler/config@0.1.0";

import { cancel, emit } from "./emit.js";
import { execute, handler, parse, reject } from "./oncebox.js";

export const incomingHandler = handler((message) => {
  const { id, amount } = order(parse(message));
  switch (message.eventType) {
    case "order.placed":
      return place(id, amount);
    case "order.paid":
      return pay(id);
    case "order.reminder":
      return remind(id);
    default:
      reject(`no event of an order: \`${message.eventType}\``);
  }
});

// Stores the order, confirms it to everyone, and sends a reminder to this consumer itself.
function place(id, amount) {
  execute("INSERT INTO purchases (order_id, amount) VALUES ($1, $2)", id, amount);
  emit(setting("confirm_to", "kafka:order-events"), "order.confirmed", { order_id: id, amount }, { key: id });
  const afterMs = Number(setting("remind_after_s", "3600")) * 1000;
  if (!Number.isSafeInteger(afterMs) || afterMs < 0) throw new Error("`remind_after_s` must be a number of seconds");
  emit(setting("remind_to", "inbox:orders"), "order.reminder", { order_id: id }, { key: id, afterMs, cancelToken: token(id) });
}

// Withdraws the reminder. It may be on its way already, so `remind` looks at the order again.
function pay(id) {
  const paid = execute("UPDATE purchases SET is_paid = true WHERE order_id = $1", id);
  if (paid === 0) reject(`no order ${id}`);
  cancel(token(id));
}

function remind(id) {
  execute("UPDATE purchases SET reminders = reminders + 1 WHERE order_id = $1 AND NOT is_paid", id);
}

// A member that is missing or of another type can never succeed, however often it is tried.
function order(payload) {
  const { order_id: id, amount = 0 } = payload ?? {};
  if (typeof id !== "string") reject("malformed payload: `order_id` must be a text");
  if (!Number.isSafeInteger(amount)) reject("malformed payload: `amount` must be an integer below 2^53");
  return { id, amount };
}

function setting(name, otherwise) {
  return get(name) ?? otherwise;
}

// One reminder of an order can be withdrawn by its name.
function token(id) {
  return `reminder:${id}`;
}
