// Messages to others, which the host sends after the commit. Yours to change. A component that calls
// this needs the grant for it: `oncebox deploy --grant emit`.
#ifndef EMIT_H
#define EMIT_H

#include "oncebox.h"

// A message to be sent. A text whose pointer is NULL is none.
typedef struct {
    text_t destination;  // `kafka:` and a topic, or `inbox:` and a consumer of the tenant
    text_t event_type;   // what happened: the CloudEvents `type`
    text_t json;         // the payload, a JSON document; none is a message without one
    text_t key;          // messages of one destination and key are sent by their due times, then in the order of their calls
    uint64_t after_ms;   // milliseconds from the beginning of the transaction; 0 is after the commit
    text_t cancel_token; // names it for `cancel`
} outgoing_t;

// Send a message after the commit, if the message that is handled commits. False when it cannot be
// sent: return false as well, it fails the message that is handled.
bool emit(const outgoing_t *message);

// Withdraw what this consumer sent with the token and no relay has begun to send. `found` says whether
// there was any, and may be NULL. False when it failed: return false as well.
bool cancel(bool *found, text_t token);

#endif
