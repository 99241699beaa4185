-- Writes what became of outgoing messages that a relay leased, and returns a line for each row that
-- it wrote. A row that another relay has leased since, or that is settled, stays as it is.
--
-- Parallel arrays, one element for each message:
--
--   p_consumer, p_message,   key of the row
--   p_ordinal, p_bucket
--   p_epoch                  number of the lease; a row with another one is not written
--   p_status                 `completed`: the destination confirmed it. `failed_retryable`: it is
--                            sent again. `parked`: an operator decides. `received`: the lease is
--                            given back, and nothing was sent; one that had failed before is
--                            `failed_retryable` again
--   p_reason, p_error        reason of the status, and the text for readers; null: none
--   p_delay_ms               milliseconds until the next attempt
--   p_counts                 whether the attempt counts
--   p_answer_status,         with `completed`: the status of an endpoint's answer that is kept, its
--   p_answer_content_type,   media type, its body, and whether the body is whole; null: none is
--   p_answer,                kept
--   p_answer_is_whole
--
-- Parameters of the call:
--
--   p_attempts_min,  a message that fails, with at least so many attempts, and so many milliseconds
--   p_age_max_ms     past its due time, is parked as `expired`
--
-- After a failure without an answer of the destination, the message may have arrived, unless the
-- destination is an inbox, where it would be marked as well. It has arrived where an endpoint took
-- it and its answer is none that the inbox takes (`undecodable`).
--
-- A confirmation is true whatever happened to the lease. So it also counts for a row whose lease
-- ran out and that nobody has leased since.
CREATE OR REPLACE FUNCTION oncebox.mark_outgoing(
    p_consumer int[], p_message text[], p_ordinal int[], p_bucket timestamptz[], p_epoch bigint[],
    p_status text[], p_reason text[], p_error text[], p_delay_ms bigint[], p_counts boolean[],
    p_attempts_min int, p_age_max_ms bigint, p_answer_status int[] DEFAULT NULL,
    p_answer_content_type text[] DEFAULT NULL, p_answer bytea[] DEFAULT NULL,
    p_answer_is_whole boolean[] DEFAULT NULL)
RETURNS TABLE (nth bigint, became text, delay_s double precision)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
    SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    RETURN QUERY UPDATE oncebox.outgoing o SET
        (status, reason, next_attempt_at) = (SELECT
            CASE WHEN k.is_expired THEN 'parked'
                WHEN s.status = 'received' AND o.reason IS NOT NULL THEN 'failed_retryable'
                ELSE s.status END,
            CASE WHEN s.status = 'completed' THEN NULL
                WHEN k.is_expired THEN 'expired'
                WHEN s.status = 'received' THEN o.reason ELSE s.reason END,
            CASE WHEN s.status IN ('received', 'failed_retryable') AND NOT k.is_expired
                THEN now() + s.delay_ms * interval '1 millisecond' END
            FROM (SELECT s.status = 'failed_retryable' AND s.counts
                AND o.attempts >= p_attempts_min
                AND o.due_at <= now() - p_age_max_ms * interval '1 millisecond' AS is_expired) k),
        last_error = CASE WHEN s.status = 'completed' THEN NULL
            WHEN s.status = 'received' THEN o.last_error ELSE s.error END,
        may_have_arrived = o.may_have_arrived OR (o.destination NOT LIKE 'inbox:%'
            AND coalesce(s.reason, '') IN ('unconfirmed', 'failed'))
            OR (o.destination LIKE 'http:%' AND coalesce(s.reason, '') = 'undecodable'),
        answer_status = CASE WHEN s.status = 'completed' THEN s.answer_status END,
        answer_content_type = CASE WHEN s.status = 'completed' THEN s.answer_content_type END,
        answer = CASE WHEN s.status = 'completed' THEN s.answer END,
        answer_is_whole = CASE WHEN s.status = 'completed' THEN s.answer_is_whole END,
        attempts = CASE WHEN s.counts THEN o.attempts ELSE greatest(o.attempts - 1, 0) END,
        locked_until = NULL, locked_by = NULL,
        settled_at = CASE WHEN s.status = 'completed' THEN now() END
    FROM unnest(p_consumer, p_message, p_ordinal, p_bucket, p_epoch, p_status, p_reason, p_error,
            p_delay_ms, p_counts, p_answer_status, p_answer_content_type, p_answer,
            p_answer_is_whole) WITH ORDINALITY
        AS s(consumer, message, ordinal, bucket, epoch, status, reason, error, delay_ms, counts,
            answer_status, answer_content_type, answer, answer_is_whole, nth)
    WHERE o.consumer_id = s.consumer AND o.message_id = s.message AND o.ordinal = s.ordinal
      AND o.bucket = s.bucket AND o.epoch = s.epoch
      -- Not as conditions on the status alone: an index of due or leased messages would serve, and
      -- all of those would be read by a plan that was made while there were none.
      AND o.status = ANY (CASE WHEN s.status = 'completed'
        THEN ARRAY['in_progress', 'received', 'failed_retryable'] ELSE ARRAY['in_progress'] END)
    RETURNING s.nth, o.status, greatest(0, extract(epoch FROM now() - o.due_at))::float8;
END $$;
