CREATE TABLE shipments (
    order_id text PRIMARY KEY,
    message_id text NOT NULL,
    warehouse text NOT NULL,
    units int NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE fulfilment_totals (
    warehouse text PRIMARY KEY,
    shipments bigint NOT NULL DEFAULT 0,
    units bigint NOT NULL DEFAULT 0
);
