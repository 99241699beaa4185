package oncebox

import (
	"encoding/json"
	"fmt"
	"time"

	emit "example.com/order-placed/bindings/oncebox_handler_0_2_0_emit"

	wit "go.bytecodealliance.org/pkg/wit/types"
)

// Outgoing is a message to others. A component that sends one needs the grant for it:
// `oncebox deploy --grant emit`.
type Outgoing struct {
	// Destination is `kafka:` and a topic, or `inbox:` and a consumer of the tenant.
	Destination string
	// EventType says what happened: the CloudEvents `type`.
	EventType string
	// Payload goes as JSON; nil is a message without one.
	Payload any
	// Key: messages of one destination and key are sent in the order of their due times, then of
	// their calls. Empty for no order.
	Key string
	// After is counted from the beginning of the transaction; zero is after the commit.
	After time.Duration
	// At is a time by the database's clock, and counts where After is zero.
	At time.Time
	// CancelToken names the message for Cancel. Empty for none.
	CancelToken string
	// Headers come behind those of CloudEvents, which the host adds itself.
	Headers []wit.Tuple2[string, []byte]
}

// EmitError is a message that cannot be sent or withdrawn. It fails the message that is handled.
type EmitError struct {
	// IsRefused: running it again cannot help.
	IsRefused bool
	Message   string
}

func (err *EmitError) Error() string { return err.Message }

// Emit sends a message after the commit, if the message that is handled commits. The answer is its id.
func Emit(outgoing Outgoing) (string, error) {
	message := emit.Outgoing{
		EventType:   outgoing.EventType,
		ContentType: wit.None[string](),
		Headers:     outgoing.Headers,
		Payload:     wit.None[[]byte](),
	}
	if outgoing.Payload != nil {
		payload, err := json.Marshal(outgoing.Payload)
		if err != nil {
			return "", fmt.Errorf("the payload is no JSON: %w", err)
		}
		message.ContentType, message.Payload = wit.Some("application/json"), wit.Some(payload)
	}
	options := emit.Options{
		Key:         wit.None[[]byte](),
		Due:         due(outgoing),
		CancelToken: wit.None[string](),
		Cause:       wit.None[string](),
	}
	if outgoing.Key != "" {
		options.Key = wit.Some([]byte(outgoing.Key))
	}
	if outgoing.CancelToken != "" {
		options.CancelToken = wit.Some(outgoing.CancelToken)
	}
	result := emit.Emit(outgoing.Destination, message, options)
	if result.IsErr() {
		return "", emitError(result.Err())
	}
	return result.Ok(), nil
}

// Cancel withdraws what this consumer sent with the token and no relay has begun to send, and tells
// whether there was any.
func Cancel(token string) (bool, error) {
	result := emit.Cancel(token)
	if result.IsErr() {
		return false, emitError(result.Err())
	}
	return result.Ok(), nil
}

func due(outgoing Outgoing) emit.Due {
	switch {
	case outgoing.After > 0:
		return emit.MakeDueAfter(uint64(outgoing.After.Milliseconds()))
	case outgoing.After == 0 && !outgoing.At.IsZero():
		return emit.MakeDueAt(outgoing.At.UnixMilli())
	default:
		return emit.MakeDueNow()
	}
}

func emitError(err emit.Error) error {
	switch err.Tag() {
	case emit.ErrorRefused:
		return &EmitError{IsRefused: true, Message: "refused: " + err.Refused()}
	case emit.ErrorLimit:
		return &EmitError{Message: "limit: " + err.Limit()}
	default:
		return &EmitError{Message: "database: " + err.Database()}
	}
}
