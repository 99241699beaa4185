// Package oncebox is what a handler needs beside the generated bindings: native values instead of
// variants, error instead of result, and a panic that leaves its text. Yours to change.
package oncebox

import (
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"strings"
	"unicode/utf8"

	export "example.com/order-placed/bindings/export_oncebox_handler_incoming_handler"
	log "example.com/order-placed/bindings/oncebox_handler_log"
	types "example.com/order-placed/bindings/oncebox_handler_types"
	_ "example.com/order-placed/bindings/wit_exports" // the component's exports

	wit "go.bytecodealliance.org/pkg/wit/types"
)

// Message as the contract has it.
type Message = types.Message

// Failure answers something else than ok. Any other error means: try again later.
type Failure struct{ answer types.Failure }

func (failure Failure) Error() string {
	switch failure.answer.Tag() {
	case types.FailureReject:
		return "reject: " + failure.answer.Reject()
	case types.FailurePark:
		return "park: " + failure.answer.Park()
	default:
		return "retry"
	}
}

// Reject says that this message can never succeed.
func Reject(format string, args ...any) error {
	return Failure{types.MakeFailureReject(fmt.Sprintf(format, args...))}
}

// Park says that a person has to look at this message first.
func Park(format string, args ...any) error {
	return Failure{types.MakeFailurePark(fmt.Sprintf(format, args...))}
}

// Retry asks to be run again after so many milliseconds; 0 is the consumer's own backoff.
func Retry(afterMs uint64) error {
	after := wit.Some(afterMs)
	if afterMs == 0 {
		after = wit.None[uint64]()
	}
	return Failure{types.MakeFailureRetry(after)}
}

// Parse reads the payload as JSON. What does not fit can never succeed: it is rejected.
func Parse(message Message, into any) error {
	if message.Payload.IsNone() {
		return Reject("the message has no payload")
	}
	payload := message.Payload.Some()
	// The decoder would replace what is not UTF-8 without a word.
	if !utf8.Valid(payload) {
		return Reject("malformed payload: it is not UTF-8")
	}
	if err := json.Unmarshal(payload, into); err != nil {
		return Reject("malformed payload: %v", err)
	}
	return nil
}

// Log writes a line into the host's log.
func Log(format string, args ...any) {
	log.Log(log.LevelInfo, fmt.Sprintf(format, args...))
}

// Handle makes a function the component's handler; call it in init. What the function returns is
// kept as the message's result, nil for none. A panic is logged with its stack, and the message is
// tried again.
func Handle(handle func(Message) (any, error)) {
	export.Handler = func(message Message) (result export.Result) {
		defer func() {
			if cause := recover(); cause != nil {
				text := fmt.Sprint(cause)
				log.Log(log.LevelError, text+"\n"+strings.TrimSpace(string(debug.Stack())))
				result = failed(types.MakeFailureOther("panic: " + text))
			}
		}()
		return answer(handle(message))
	}
}

func answer(value any, err error) export.Result {
	var failure Failure
	switch {
	case errors.As(err, &failure):
		return failed(failure.answer)
	case err != nil:
		return failed(types.MakeFailureOther(err.Error()))
	case value == nil:
		return wit.Ok[wit.Option[string], types.Failure](wit.None[string]())
	}
	text, err := json.Marshal(value)
	if err != nil {
		return failed(types.MakeFailureOther("the result is no JSON: " + err.Error()))
	}
	return wit.Ok[wit.Option[string], types.Failure](wit.Some(string(text)))
}

func failed(failure types.Failure) export.Result {
	return wit.Err[wit.Option[string], types.Failure](failure)
}
