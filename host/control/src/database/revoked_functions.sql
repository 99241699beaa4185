SELECT p.oid FROM pg_proc p
WHERE p.pronamespace = 'pg_catalog'::regnamespace
  AND (p.proname IN ('set_config', 'pg_sleep', 'pg_sleep_for', 'pg_sleep_until', 'pg_notify', 'pg_terminate_backend',
                     'pg_cancel_backend', 'pg_logical_emit_message', 'pg_export_snapshot', 'loread', 'lowrite',
                     'ts_stat', 'ts_rewrite', 'pg_lock_status', 'setseed',
                     -- These lock relations, of other tenants as well, to the end of the transaction.
                     'pg_get_viewdef', 'pg_get_ruledef', 'pg_get_functiondef', 'pg_get_function_sqlbody',
                     'pg_get_partition_constraintdef', 'pg_partition_tree', 'pg_sequence_last_value',
                     'fmgr_sql_validator', 'plpgsql_validator',
                     -- These tell of transactions and sessions of others, and of the server.
                     'pg_xact_status', 'txid_status', 'pg_blocking_pids', 'pg_safe_snapshot_blocking_pids',
                     'pg_database_size', 'pg_tablespace_size')
    OR p.proname ~ '^pg_(try_)?advisory_' OR p.proname ~ '^lo_' OR p.proname ~ '_to_xml' OR p.proname ~ '^pg_control_')
