// Books an order once. Both statements run in the host's open transaction, which also marks the
// message as done: they are committed with it or not at all.
package main

import "example.com/order-placed/oncebox"

// Pointers tell a member that is missing from one that is zero.
type order struct {
	ID      *string `json:"order_id"`
	Account *int32  `json:"account"`
	Amount  *int64  `json:"amount"`
	Note    *string `json:"note"`
}

func place(message oncebox.Message) (any, error) {
	var order order
	if err := oncebox.Parse(message, &order); err != nil {
		return nil, err
	}
	if order.ID == nil || order.Account == nil || order.Amount == nil || order.Note == nil {
		return nil, oncebox.Reject("malformed payload: it must have order_id, account, amount and note")
	}
	_, err := oncebox.Execute("INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)",
		*order.ID, *order.Account, *order.Amount, *order.Note)
	if err != nil {
		return nil, err
	}
	touched, err := oncebox.Execute("UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1", *order.Account, *order.Amount)
	if err != nil {
		return nil, err
	}
	if touched == 0 {
		return nil, oncebox.Reject("no account %d", *order.Account)
	}
	return nil, nil
}

func init() { oncebox.Handle(place) }

// A component is called through its exports; Go wants a main all the same.
func main() {}
