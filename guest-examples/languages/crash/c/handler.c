// A handler with a bug, for the tests: what it says must reach whoever looks at the message.
#include <assert.h>

#include "oncebox.h"

bool handle(const message_t *message) {
    json_t order;
    text_t id;
    int64_t lines = 0;

    if (!parse(message, &order) || !json_text(order, "order_id", &id)) return false;
    if (!execute(NULL, "INSERT INTO orders (id, account, amount, note) VALUES ($1, 17, 1, '')", PARAMS(text_value(id)))) return false;
    assert(lines > 3);
    return true;
}
