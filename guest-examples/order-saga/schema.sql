CREATE TABLE stock (
    sku text PRIMARY KEY,
    units int NOT NULL CHECK (units >= 0)
);

-- The process of each order. `placed` is a state within the first message alone. `rejected`,
-- `charged`, `refused` and `voided` are ends. So is `timed_out`, unless the charge may have been
-- made: it goes on to `voided` then.
CREATE TABLE orders (
    order_id text PRIMARY KEY,
    sku text NOT NULL,
    units int NOT NULL,
    amount bigint NOT NULL,
    state text NOT NULL CHECK (state IN
        ('placed', 'rejected', 'charging', 'charged', 'refused', 'timed_out', 'voided'))
);
