"""Tells others of an order, and reminds itself of one that is not paid: outgoing messages, which
are sent after the commit of the message that causes them, or not at all."""

from dataclasses import dataclass

import oncebox
from emit import cancel, emit
from oncebox import Message, execute, parse, reject
from wit_world.imports import config


@dataclass
class Order:
    order_id: str
    amount: int

    @property
    def token(self) -> str:
        """One reminder of an order can be withdrawn by its name."""
        return f"reminder:{self.order_id}"


def handle(message: Message) -> None:
    order = read_order(parse(message))
    match message.event_type:
        case "order.placed":
            place(order)
        case "order.paid":
            pay(order)
        case "order.reminder":
            remind(order)
        case other:
            reject(f"no event of an order: `{other}`")


def place(order: Order) -> None:
    """Stores the order, confirms it to everyone, and sends a reminder to this consumer itself."""
    execute("INSERT INTO purchases (order_id, amount) VALUES ($1, $2)", order.order_id, order.amount)
    emit(
        setting("confirm_to", "kafka:order-events"),
        "order.confirmed",
        {"order_id": order.order_id, "amount": order.amount},
        key=order.order_id,
    )
    emit(
        setting("remind_to", "inbox:orders"),
        "order.reminder",
        {"order_id": order.order_id},
        key=order.order_id,
        after_ms=int(setting("remind_after_s", "3600")) * 1000,
        cancel_token=order.token,
    )


def pay(order: Order) -> None:
    """Withdraws the reminder. It may be on its way already, so `remind` looks at the order again."""
    paid = execute("UPDATE purchases SET is_paid = true WHERE order_id = $1", order.order_id)
    if paid == 0:
        reject(f"no order {order.order_id}")
    cancel(order.token)


def remind(order: Order) -> None:
    execute(
        "UPDATE purchases SET reminders = reminders + 1 WHERE order_id = $1 AND NOT is_paid",
        order.order_id,
    )


def read_order(payload: object) -> Order:
    """A member that is missing or of another type can never succeed, however often it is tried."""
    match payload:
        case {"order_id": str(order_id)}:
            amount = payload.get("amount", 0)
            # A bool is an int to Python, and an int has no end.
            if type(amount) is int and -(2**63) <= amount < 2**63:
                return Order(order_id, amount)
    reject("malformed payload: it must be order_id (text) and amount (an integer)")


def setting(name: str, otherwise: str) -> str:
    value = config.get(name)
    return otherwise if value is None else value


# The contract's name: componentize-py looks for this class in `app`.
IncomingHandler = oncebox.handler(handle)
