#include "emit.h"

#include "bindings/emitter.h"

// Each world has types of its own in the generated bindings, also for texts and bytes.
static emitter_string_t string(text_t text) { return (emitter_string_t){text.ptr, text.len}; }

static emitter_option_string_t optional_string(text_t text) {
    return (emitter_option_string_t){.is_some = text.ptr != NULL, .val = string(text)};
}

static emitter_option_list_u8_t optional_bytes(text_t text) {
    return (emitter_option_list_u8_t){.is_some = text.ptr != NULL, .val = {text.ptr, text.len}};
}

static bool failed(const oncebox_handler_emit_error_t *error) {
    // All cases hold a text, in the same place.
    return other("%.*s", (int)error->val.refused.len, error->val.refused.ptr);
}

bool emit(const outgoing_t *message) {
    text_t json_type = text("application/json"), none = {0};
    emitter_string_t id, destination = string(message->destination);
    oncebox_handler_emit_error_t error;
    oncebox_handler_emit_outgoing_t outgoing = {
        .event_type = string(message->event_type),
        .content_type = optional_string(message->json.ptr ? json_type : none),
        .headers = {NULL, 0},
        .payload = optional_bytes(message->json),
    };
    oncebox_handler_emit_options_t options = {
        .key = optional_bytes(message->key),
        .due = {.tag = ONCEBOX_HANDLER_EMIT_DUE_NOW},
        .cancel_token = optional_string(message->cancel_token),
        .cause = {.is_some = false},
    };
    if (message->after_ms) {
        options.due.tag = ONCEBOX_HANDLER_EMIT_DUE_AFTER;
        options.due.val.after = message->after_ms;
    }
    return oncebox_handler_emit_emit(&destination, &outgoing, &options, &id, &error) || failed(&error);
}

bool cancel(bool *found, text_t token) {
    bool was_found;
    emitter_string_t name = string(token);
    oncebox_handler_emit_error_t error;
    return oncebox_handler_emit_cancel(&name, found ? found : &was_found, &error) || failed(&error);
}
