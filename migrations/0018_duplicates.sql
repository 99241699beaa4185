-- Deliveries that were refused, since their message was done already. Hosts count them in memory and add every two seconds what
-- they refused meanwhile, so that a duplicate costs no write of its own. What a host that dies had not added yet is lost: the
-- count is a lower bound.
CREATE TABLE oncebox.duplicates_refused (
    consumer_id           int PRIMARY KEY REFERENCES oncebox.consumer ON DELETE CASCADE,
    refused               bigint NOT NULL CONSTRAINT duplicates_refused_counts_up CHECK (refused >= 0),
    -- Since when they are counted.
    since                 timestamptz NOT NULL,
    -- When a host added some last.
    last_at               timestamptz
);

-- Those of a consumer that is made later are counted from its beginning on, without a row before the first.
INSERT INTO oncebox.duplicates_refused (consumer_id, refused, since) SELECT consumer_id, 0, now() FROM oncebox.consumer;
