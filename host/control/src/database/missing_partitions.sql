-- The leaf partitions that the present and the next $1 buckets still lack, of the retention classes that a consumer has
-- and of the classes $2, and of outgoing messages, whose buckets are days, where there is a consumer.
SELECT p.parent, p.name, p.from_at, p.to_at
FROM (
    SELECT 'inbox_' || r.name AS parent,
           'inbox_' || r.name || to_char(b.from_at AT TIME ZONE 'UTC', '_YYYYMMDDHH24MISS') AS name,
           b.from_at, b.from_at + r.bucket AS to_at
    FROM oncebox.retention_class r,
         generate_series(0, $1) AS n,
         LATERAL (SELECT date_bin(r.bucket, now(), '2000-01-03 00:00:00+00') + n * r.bucket AS from_at) b
    WHERE r.retention_class = ANY ($2) OR EXISTS (SELECT FROM oncebox.consumer c WHERE c.retention_class = r.retention_class)
    UNION ALL
    SELECT 'outgoing', 'outgoing_' || to_char(d.from_at AT TIME ZONE 'UTC', 'YYYYMMDD'), d.from_at, d.from_at + interval '24 hours'
    FROM generate_series(0, $1) AS n,
         LATERAL (SELECT date_bin('1 day', now(), '2000-01-03 00:00:00+00') + n * interval '24 hours' AS from_at) d
    WHERE cardinality($2) > 0 OR EXISTS (SELECT FROM oncebox.consumer)
) p
WHERE NOT EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace s ON s.oid = c.relnamespace
                  WHERE s.nspname = 'oncebox' AND c.relname = p.name)
ORDER BY p.name
