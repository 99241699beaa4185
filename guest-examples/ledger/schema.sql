CREATE TABLE account (
    account text PRIMARY KEY,
    balance numeric NOT NULL DEFAULT 0
);

-- No key on the message id: a payment booked twice shows as two rows.
CREATE TABLE ledger_entry (
    entry bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    message_id text NOT NULL,
    account text NOT NULL,
    amount numeric NOT NULL
);
