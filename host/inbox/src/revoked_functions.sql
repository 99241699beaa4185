SELECT p.oid FROM pg_proc p
WHERE p.pronamespace = 'pg_catalog'::regnamespace
  AND (p.proname IN ('set_config', 'pg_sleep', 'pg_sleep_for', 'pg_sleep_until', 'pg_notify', 'pg_terminate_backend',
                     'pg_cancel_backend', 'pg_logical_emit_message', 'pg_export_snapshot', 'loread', 'lowrite',
                     'ts_stat', 'ts_rewrite', 'pg_lock_status', 'setseed')
    OR p.proname ~ '^pg_(try_)?advisory_' OR p.proname ~ '^lo_' OR p.proname ~ '_to_xml')
