CREATE TABLE orders (
    id text PRIMARY KEY,
    account int NOT NULL,
    amount bigint NOT NULL,
    note text NOT NULL
);

CREATE TABLE account (
    id int PRIMARY KEY,
    balance bigint NOT NULL DEFAULT 0,
    n bigint NOT NULL DEFAULT 0
);

INSERT INTO account (id) SELECT generate_series(1, 20);
