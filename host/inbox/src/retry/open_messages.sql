-- Of consumers ($1) with their retention classes ($2), what is open in their inboxes, by state and
-- reason. Each state is read from its oldest message on, by index, up to $3 messages.
SELECT c.id, s.status, x.reason, count(*) AS messages, min(x.received_at) AS oldest,
    extract(epoch FROM now() - min(x.received_at))::float8 AS oldest_age_s
FROM unnest($1::int[], $2::smallint[]) AS c(id, class),
    unnest(ARRAY['received', 'in_progress', 'failed_retryable', 'waiting', 'failed_terminal', 'parked']) AS s(status),
    LATERAL (
        SELECT split_part(i.reason, ':', 1) AS reason, i.received_at FROM oncebox.inbox i
        WHERE i.consumer_id = c.id AND i.retention_class = c.class AND i.status = s.status AND i.status <> 'completed'
        ORDER BY i.received_at LIMIT $3
    ) x
GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
