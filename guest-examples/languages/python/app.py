"""Books an order once. Both statements run in the host's open transaction, which also marks the
message as done: they are committed with it or not at all."""

from dataclasses import dataclass

import oncebox
from oncebox import Message, execute, parse, reject


@dataclass
class Order:
    order_id: str
    account: int
    amount: int
    note: str


def place(message: Message) -> None:
    order = read_order(parse(message))
    execute(
        "INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)",
        order.order_id, order.account, order.amount, order.note,
    )
    touched = execute(
        "UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1",
        order.account, order.amount,
    )
    if touched == 0:
        reject(f"no account {order.account}")


def read_order(payload: object) -> Order:
    """A member that is missing or of another type can never succeed, however often it is tried."""
    match payload:
        case {"order_id": str(order_id), "account": int(account), "amount": int(amount), "note": str(note)}:
            # A bool is an int to Python, and an int has no end.
            if bool not in (type(account), type(amount)) and -(2**31) <= account < 2**31 and -(2**63) <= amount < 2**63:
                return Order(order_id, account, amount, note)
    reject("malformed payload: it must be order_id (text), account, amount (integers), note (text)")


# The contract's name: componentize-py looks for this class in `app`.
IncomingHandler = oncebox.handler(place)
