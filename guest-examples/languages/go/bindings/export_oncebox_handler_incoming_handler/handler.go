// Package export_oncebox_handler_incoming_handler is what the generated bindings call; its name
// and its function are theirs.
package export_oncebox_handler_incoming_handler

import (
	"example.com/order-placed/bindings/oncebox_handler_types"

	"go.bytecodealliance.org/pkg/wit/types"
)

// Result is what the contract expects.
type Result = wit_types.Result[wit_types.Option[string], oncebox_handler_types.Failure]

// Handler is set by package oncebox.
var Handler func(oncebox_handler_types.Message) Result

// Handle is called once for each message, in a fresh instance.
func Handle(message oncebox_handler_types.Message) Result {
	return Handler(message)
}
