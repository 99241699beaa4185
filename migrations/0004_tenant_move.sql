-- Locks: oncebox.tenant, an instant

-- The moves of tenants from one database to another that are under way: a row from the begin of
-- each until nothing of the tenant is left where it is not any more. Rows are in the host's
-- database alone.
CREATE SEQUENCE oncebox.tenant_move_epoch AS bigint;
CREATE TABLE oncebox.tenant_move (
    tenant_id             int PRIMARY KEY REFERENCES oncebox.tenant ON DELETE CASCADE,
    -- `preparing`: the tenant runs, and the move is tried as far as that stops nothing. `stopping`:
    -- its consumers stop. `copying`: it is shut out of the database that it leaves, and its rows are
    -- copied. `moved`: it is in the other database, and what is left in the first is removed.
    -- `cancelled`: it stays, and what is left of it in the other one is removed.
    step                  text NOT NULL DEFAULT 'preparing' CONSTRAINT tenant_move_step_known
        CHECK (step IN ('preparing', 'stopping', 'copying', 'moved', 'cancelled')),
    -- `database` and `database_url` of the tenant before the move.
    from_database         text,
    from_database_url     bytea,
    -- Name of the other database in the settings of hosts. Never changes.
    to_database           text NOT NULL,
    -- Whether something of the tenant may be in the other database.
    is_made               boolean NOT NULL DEFAULT false,
    -- State of the tenant before `stopping`. Null before that.
    state_before          text,
    -- Revision of the tenant from `stopping` on: the copy of this move has it. Null before that.
    revision              bigint,
    -- Number that the host that works on it has taken. A host with another one has lost the move;
    -- no number comes twice.
    epoch                 bigint NOT NULL DEFAULT 0,
    -- The last of them.
    host                  text,
    began_at              timestamptz NOT NULL DEFAULT now(),
    began_by              text NOT NULL,
    -- Time of the step `moved`. Null before that.
    moved_at              timestamptz,
    -- Bytes that the copy under way has read, for readers.
    copied_bytes          bigint NOT NULL DEFAULT 0,
    -- Text of the error that ended the last try. Null: it did not fail.
    error                 text,
    CONSTRAINT tenant_move_stopping_has_state CHECK ((state_before IS NULL) = (revision IS NULL)),
    CONSTRAINT tenant_move_moved_has_time CHECK ((step = 'moved') = (moved_at IS NOT NULL))
);
