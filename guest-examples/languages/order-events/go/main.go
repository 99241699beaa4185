// Tells others of an order, and reminds itself of one that is not paid: outgoing messages, which
// are sent after the commit of the message that causes them, or not at all.
package main

import (
	"fmt"
	"strconv"
	"time"

	config "example.com/order-placed/bindings/oncebox_handler_config"
	"example.com/order-placed/oncebox"
)

// A pointer tells a member that is missing from one that is zero.
type order struct {
	ID     *string `json:"order_id"`
	Amount int64   `json:"amount"`
}

func handle(message oncebox.Message) (any, error) {
	var order order
	if err := oncebox.Parse(message, &order); err != nil {
		return nil, err
	}
	if order.ID == nil {
		return nil, oncebox.Reject("malformed payload: it must have order_id")
	}
	switch message.EventType {
	case "order.placed":
		return nil, place(*order.ID, order.Amount)
	case "order.paid":
		return nil, pay(*order.ID)
	case "order.reminder":
		return nil, remind(*order.ID)
	default:
		return nil, oncebox.Reject("no event of an order: `%s`", message.EventType)
	}
}

// Stores the order, confirms it to everyone, and sends a reminder to this consumer itself.
func place(id string, amount int64) error {
	if _, err := oncebox.Execute("INSERT INTO purchases (order_id, amount) VALUES ($1, $2)", id, amount); err != nil {
		return err
	}
	_, err := oncebox.Emit(oncebox.Outgoing{
		Destination: setting("confirm_to", "kafka:order-events"),
		EventType:   "order.confirmed",
		Payload:     map[string]any{"order_id": id, "amount": amount},
		Key:         id,
	})
	if err != nil {
		return err
	}
	after, err := strconv.ParseUint(setting("remind_after_s", "3600"), 10, 32)
	if err != nil {
		return fmt.Errorf("`remind_after_s` must be a number of seconds: %w", err)
	}
	_, err = oncebox.Emit(oncebox.Outgoing{
		Destination: setting("remind_to", "inbox:orders"),
		EventType:   "order.reminder",
		Payload:     map[string]any{"order_id": id},
		Key:         id,
		After:       time.Duration(after) * time.Second,
		CancelToken: token(id),
	})
	return err
}

// Withdraws the reminder. It may be on its way already, so remind looks at the order again.
func pay(id string) error {
	paid, err := oncebox.Execute("UPDATE purchases SET is_paid = true WHERE order_id = $1", id)
	if err != nil {
		return err
	}
	if paid == 0 {
		return oncebox.Reject("no order %s", id)
	}
	_, err = oncebox.Cancel(token(id))
	return err
}

func remind(id string) error {
	_, err := oncebox.Execute("UPDATE purchases SET reminders = reminders + 1 WHERE order_id = $1 AND NOT is_paid", id)
	return err
}

func setting(name, otherwise string) string { return config.Get(name).SomeOr(otherwise) }

// One reminder of an order can be withdrawn by its name.
func token(id string) string { return "reminder:" + id }

func init() { oncebox.Handle(handle) }

// A component is called through its exports; Go wants a main all the same.
func main() {}
