CREATE TABLE stock (
    sku text PRIMARY KEY,
    available int NOT NULL CHECK (available >= 0)
);

CREATE TABLE inventory_reservations (
    reservation_id text PRIMARY KEY,
    order_id text NOT NULL,
    sku text NOT NULL,
    quantity int NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

INSERT INTO stock VALUES ('apple', 100);
