CREATE TABLE purchases (
    order_id text PRIMARY KEY,
    amount bigint NOT NULL,
    is_paid boolean NOT NULL DEFAULT false,
    reminders int NOT NULL DEFAULT 0
);
