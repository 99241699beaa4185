"""A handler with a bug, for the tests: what it says must reach whoever looks at the message."""

import oncebox
from oncebox import Message, execute, parse


def place(message: Message) -> None:
    order = parse(message)
    execute(
        "INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)",
        order["order_id"], order["account"], order["amount"], order["note"],
    )
    for line in order["lines"]:
        print(line)


IncomingHandler = oncebox.handler(place)
