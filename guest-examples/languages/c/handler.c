// Books an order once. Both statements run in the host's open transaction, which also marks the
// message as done: they are committed with it or not at all.
#include "oncebox.h"

bool handle(const message_t *message) {
    json_t order;
    text_t id, note;
    int64_t account, amount;
    uint64_t touched;

    if (!parse(message, &order)) return false;
    // A member that is missing or of another type can never succeed, however often it is tried.
    if (!json_text(order, "order_id", &id) || !json_text(order, "note", &note) ||
        !json_int(order, "account", INT32_MIN, INT32_MAX, &account) || !json_int(order, "amount", INT64_MIN, INT64_MAX, &amount))
        return reject("malformed payload: it must have order_id, note (texts), account and amount (integers)");

    if (!execute(NULL, "INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)",
                 PARAMS(text_value(id), int_value(account), int_value(amount), text_value(note))))
        return false;
    if (!execute(&touched, "UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1",
                 PARAMS(int_value(account), int_value(amount))))
        return false;
    if (touched == 0) return reject("no account %lld", account);
    return true;
}
