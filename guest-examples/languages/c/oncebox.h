// What a handler needs beside the generated bindings: short names, parameters as values, and
// answers that can be returned from anywhere. Yours to change.
#ifndef ONCEBOX_H
#define ONCEBOX_H

#include "bindings/handler.h"

// Every text has a length; it need not end with a zero byte.
typedef handler_string_t text_t;
typedef oncebox_handler_types_message_t message_t;
typedef oncebox_handler_sql_value_t value_t;
typedef oncebox_handler_sql_result_set_t rows_t;

// You write this. True is ok; false is what one of the next four functions said.
bool handle(const message_t *message);

// Each returns false, so that a handler can end with `return reject(…)`. The formats are printf's.
bool reject(const char *format, ...) __attribute__((format(printf, 1, 2))); // can never succeed
bool park(const char *format, ...) __attribute__((format(printf, 1, 2)));   // a person has to look first
bool other(const char *format, ...) __attribute__((format(printf, 1, 2)));  // again later, for this reason
bool retry(int64_t after_ms); // again later; a negative number is the consumer's own backoff

// A text as printf makes it, which ends with a zero byte behind its length.
text_t text(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Keep this JSON document with the message.
void result(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Run a statement; `touched` may be NULL. False when it failed: return false as well, the transaction
// is lost unless the statement came after a savepoint.
bool execute(uint64_t *touched, const char *statement, const value_t *params, size_t count);
bool query(rows_t *rows, const char *statement, const value_t *params, size_t count);

// The last two arguments: execute(NULL, "… $1 … $2", PARAMS(int_value(1), text_value(name)))
#define PARAMS(...) (value_t[]){__VA_ARGS__}, sizeof((value_t[]){__VA_ARGS__}) / sizeof(value_t)

value_t null_value(void);
value_t bool_value(bool value);
value_t int_value(int64_t value); // any integer column
value_t double_value(double value);
value_t text_value(text_t value); // also for numeric, uuid, json and enums

// The payload, checked to be one JSON document in UTF-8. False, and the message rejected, otherwise.
typedef struct {
    const char *at, *end;
} json_t;
bool parse(const message_t *message, json_t *json);

// A member of an object. False when it is missing, of another type or out of range.
bool json_text(json_t object, const char *name, text_t *value);
bool json_int(json_t object, const char *name, int64_t min, int64_t max, int64_t *value);
// Whether an object has a member, of whatever type.
bool json_has(json_t object, const char *name);

// A text in UTF-8 as a JSON string, with its quotes.
text_t json_quote(text_t text);

#endif
