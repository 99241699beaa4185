-- Starts of consumers that a host might not survive: a mark is written before each, and taken away when the start was
-- survived. The mark of a host that is gone says what it was about when it ended.

-- The revision that its policy was last changed with. Pausing, resuming and suspending raise the revision, and leave what is
-- handed to native libraries as it is.
ALTER TABLE oncebox.consumer ADD COLUMN policy_revision bigint NOT NULL DEFAULT 0;

-- What is known of a consumer's starts.
CREATE TABLE oncebox.consumer_start (
    consumer_id           int PRIMARY KEY REFERENCES oncebox.consumer ON DELETE CASCADE,
    -- The policy, by its revision, and the build of a host that survived its start.
    proven_revision       bigint,
    proven_build          text,
    -- Hosts in a row that ended while they started it, and may have had another reason.
    suspicions            int NOT NULL DEFAULT 0,
    -- Hosts that it ended, as far as one can tell.
    deaths                int NOT NULL DEFAULT 0,
    -- The policy, by its revision, that is not started any more; since when, and the host that ended.
    quarantined_revision  bigint,
    quarantined_at        timestamptz,
    quarantined_host_id   bigint,
    quarantined_host      text,
    CONSTRAINT consumer_start_quarantine_whole CHECK ((quarantined_revision IS NULL) = (quarantined_at IS NULL)
        AND (quarantined_revision IS NULL) = (quarantined_host IS NULL))
);

-- A host is starting a consumer. It outlives the host's row, which is what makes it one of a host that is gone.
CREATE TABLE oncebox.start_mark (
    consumer_id           int NOT NULL REFERENCES oncebox.consumer ON DELETE CASCADE,
    host_id               bigint NOT NULL,
    host                  text NOT NULL,
    policy_revision       bigint NOT NULL,
    -- No host of this build survived this policy yet: one host tries it, and one such consumer at a time.
    is_unproven           boolean NOT NULL,
    -- Whether the part is over in which nothing else of this host is so marked.
    is_settling           boolean NOT NULL DEFAULT false,
    started_at            timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_id, host_id)
);
