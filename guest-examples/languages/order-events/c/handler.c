// Tells others of an order, and reminds itself of one that is not paid: outgoing messages, which
// are sent after the commit of the message that causes them, or not at all.
#include "emit.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static bool is(text_t text, const char *name) { return text.len == strlen(name) && !memcmp(text.ptr, name, text.len); }

static text_t setting(const char *name, const char *otherwise) {
    text_t key, value;
    handler_string_set(&key, name);
    if (!oncebox_handler_config_get(&key, &value)) handler_string_set(&value, otherwise);
    return value;
}

// One reminder of an order can be withdrawn by its name.
static text_t token(text_t id) { return text("reminder:%.*s", (int)id.len, id.ptr); }

static bool remind_after(uint64_t *after_ms) {
    text_t given = setting("remind_after_s", "3600");
    // The copy ends with a zero byte.
    const char *seconds = (const char *)text("%.*s", (int)given.len, given.ptr).ptr;
    char *end;
    errno = 0;
    *after_ms = strtoul(seconds, &end, 10) * 1000ull;
    if (errno || end == seconds || *end || *seconds == '-') return other("`remind_after_s` must be a number of seconds");
    return true;
}

// Stores the order, confirms it to everyone, and sends a reminder to this consumer itself.
static bool place(text_t id, int64_t amount) {
    uint64_t after_ms;
    text_t quoted = json_quote(id);

    if (!execute(NULL, "INSERT INTO purchases (order_id, amount) VALUES ($1, $2)", PARAMS(text_value(id), int_value(amount))))
        return false;
    if (!emit(&(outgoing_t){
            .destination = setting("confirm_to", "kafka:order-events"),
            .event_type = text("order.confirmed"),
            .json = text("{\"order_id\":%.*s,\"amount\":%lld}", (int)quoted.len, quoted.ptr, amount),
            .key = id,
        }))
        return false;
    if (!remind_after(&after_ms)) return false;
    return emit(&(outgoing_t){
        .destination = setting("remind_to", "inbox:orders"),
        .event_type = text("order.reminder"),
        .json = text("{\"order_id\":%.*s}", (int)quoted.len, quoted.ptr),
        .key = id,
        .after_ms = after_ms,
        .cancel_token = token(id),
    });
}

// Withdraws the reminder. It may be on its way already, so `remind` looks at the order again.
static bool pay(text_t id) {
    uint64_t paid;
    if (!execute(&paid, "UPDATE purchases SET is_paid = true WHERE order_id = $1", PARAMS(text_value(id)))) return false;
    if (paid == 0) return reject("no order %.*s", (int)id.len, id.ptr);
    return cancel(NULL, token(id));
}

static bool remind(text_t id) {
    return execute(NULL, "UPDATE purchases SET reminders = reminders + 1 WHERE order_id = $1 AND NOT is_paid", PARAMS(text_value(id)));
}

bool handle(const message_t *message) {
    json_t order;
    text_t id, event_type = message->event_type;
    int64_t amount = 0;

    if (!parse(message, &order)) return false;
    // A member that is missing or of another type can never succeed, however often it is tried.
    if (!json_text(order, "order_id", &id) || (json_has(order, "amount") && !json_int(order, "amount", INT64_MIN, INT64_MAX, &amount)))
        return reject("malformed payload: it must have order_id (a text), and amount is an integer");

    if (is(event_type, "order.placed")) return place(id, amount);
    if (is(event_type, "order.paid")) return pay(id);
    if (is(event_type, "order.reminder")) return remind(id);
    return reject("no event of an order: `%.*s`", (int)event_type.len, event_type.ptr);
}
