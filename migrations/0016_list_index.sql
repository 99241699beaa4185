-- A list of a consumer's messages begins with the newest and ends with its page. Without an index in that order every
-- page of it sorts the consumer's whole part of the inbox. A message costs one more entry, at the right edge of its
-- consumer's part, and no update of a row that stays in its bucket changes it, since nothing changes when a message was
-- received.
--
-- It is on an expression, so that only a list can use it, which says the same: on the bare column, a claim whose plan is
-- made while a partition is new and empty may take it for as good as the key, and read a consumer's whole part for
-- every message once that has filled.
CREATE INDEX inbox_newest ON oncebox.inbox ((consumer_id::bigint), received_at);
