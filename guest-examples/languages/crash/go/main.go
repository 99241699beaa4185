// A handler with a bug, for the tests: what it says must reach whoever looks at the message.
package main

import "example.com/order-placed/oncebox"

func place(message oncebox.Message) (any, error) {
	var order struct {
		ID     string   `json:"order_id"`
		Amount int64    `json:"amount"`
		Lines  []string `json:"lines"`
	}
	if err := oncebox.Parse(message, &order); err != nil {
		return nil, err
	}
	if _, err := oncebox.Execute("INSERT INTO orders (id, account, amount, note) VALUES ($1, 17, $2, '')", order.ID, order.Amount); err != nil {
		return nil, err
	}
	return order.Lines[3], nil
}

func init() { oncebox.Handle(place) }

func main() {}
