#include "oncebox.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

// An instance handles one message and ends, so its answer can be kept here and nothing is freed.
static exports_oncebox_handler_incoming_handler_failure_t failure;
static handler_option_string_t answer;

static text_t print(const char *format, va_list args) {
    char *text = NULL;
    int length = vasprintf(&text, format, args);
    if (length < 0) abort();
    return (text_t){(uint8_t *)text, (size_t)length};
}

#define FORMATTED(into)            \
    do {                           \
        va_list args;              \
        va_start(args, format);    \
        (into) = print(format, args); \
        va_end(args);              \
    } while (0)

bool reject(const char *format, ...) {
    failure.tag = ONCEBOX_HANDLER_TYPES_FAILURE_REJECT;
    FORMATTED(failure.val.reject);
    return false;
}

bool park(const char *format, ...) {
    failure.tag = ONCEBOX_HANDLER_TYPES_FAILURE_PARK;
    FORMATTED(failure.val.park);
    return false;
}

bool retry(int64_t after_ms) {
    failure.tag = ONCEBOX_HANDLER_TYPES_FAILURE_RETRY;
    failure.val.retry = (handler_option_u64_t){after_ms >= 0, (uint64_t)after_ms};
    return false;
}

bool other(const char *format, ...) {
    failure.tag = ONCEBOX_HANDLER_TYPES_FAILURE_OTHER;
    FORMATTED(failure.val.other);
    return false;
}

text_t text(const char *format, ...) {
    text_t text;
    FORMATTED(text);
    return text;
}

void result(const char *format, ...) {
    answer.is_some = true;
    FORMATTED(answer.val);
}

bool exports_oncebox_handler_incoming_handler_handle(message_t *message, handler_option_string_t *ret,
                                                     exports_oncebox_handler_incoming_handler_failure_t *err) {
    // What a handler that returns false without a reason says.
    other("the handler gave no reason");
    bool is_ok = handle(message);
    *ret = answer;
    *err = failure;
    return is_ok;
}

static bool failed(const oncebox_handler_sql_error_t *error) {
    if (error->tag == ONCEBOX_HANDLER_SQL_ERROR_DATABASE) {
        const oncebox_handler_sql_database_error_t *database = &error->val.database;
        return other("%.*s: %.*s", (int)database->sqlstate.len, database->sqlstate.ptr, (int)database->message.len, database->message.ptr);
    }
    // The other cases hold a text each, in the same place.
    return other("%.*s", (int)error->val.refused.len, error->val.refused.ptr);
}

bool execute(uint64_t *touched, const char *statement, const value_t *params, size_t count) {
    text_t text;
    uint64_t rows;
    oncebox_handler_sql_error_t error;
    oncebox_handler_sql_list_value_t list = {(value_t *)params, count};
    handler_string_set(&text, statement);
    if (!oncebox_handler_sql_execute(&text, &list, touched ? touched : &rows, &error)) return failed(&error);
    return true;
}

bool query(rows_t *rows, const char *statement, const value_t *params, size_t count) {
    text_t text;
    oncebox_handler_sql_error_t error;
    oncebox_handler_sql_list_value_t list = {(value_t *)params, count};
    handler_string_set(&text, statement);
    if (!oncebox_handler_sql_query(&text, &list, rows, &error)) return failed(&error);
    return true;
}

value_t null_value(void) { return (value_t){.tag = ONCEBOX_HANDLER_SQL_VALUE_NULL}; }

value_t bool_value(bool value) { return (value_t){.tag = ONCEBOX_HANDLER_SQL_VALUE_BOOLEAN, .val.boolean = value}; }

value_t int_value(int64_t value) { return (value_t){.tag = ONCEBOX_HANDLER_SQL_VALUE_INT8, .val.int8 = value}; }

value_t double_value(double value) { return (value_t){.tag = ONCEBOX_HANDLER_SQL_VALUE_FLOAT8, .val.float8 = value}; }

value_t text_value(text_t value) { return (value_t){.tag = ONCEBOX_HANDLER_SQL_VALUE_TEXT, .val.text = value}; }
