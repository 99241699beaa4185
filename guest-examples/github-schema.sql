CREATE TABLE repository_activity (
    repository bigint PRIMARY KEY,
    full_name text NOT NULL,
    commits bigint NOT NULL DEFAULT 0,
    pushes bigint NOT NULL DEFAULT 0,
    stars bigint NOT NULL DEFAULT 0
);

-- `state` and `updated_at` are those of the newest event that named a state; null until one
-- did. The collation is fixed because the state's text breaks ties.
CREATE TABLE issue (
    repository bigint,
    number bigint,
    state text COLLATE "C",
    events bigint NOT NULL,
    updated_at timestamptz,
    PRIMARY KEY (repository, number)
);

-- `state` is `open`, `closed` or `merged`.
CREATE TABLE pull_request (
    repository bigint,
    number bigint,
    state text COLLATE "C",
    events bigint NOT NULL,
    updated_at timestamptz,
    PRIMARY KEY (repository, number)
);

-- No key on the delivery: an effect that happened twice shows as two rows.
CREATE TABLE audit (
    entry bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    delivery text NOT NULL,
    event text NOT NULL,
    action text,
    repository bigint
);
