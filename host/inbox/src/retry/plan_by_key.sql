-- What is found by its keys is planned by them, once for each connection, whatever the statistics say.
SET LOCAL plan_cache_mode = force_generic_plan;
SET LOCAL enable_seqscan = off;
SET LOCAL enable_sort = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL jit = off;
