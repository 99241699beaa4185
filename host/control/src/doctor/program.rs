//! Objects that this program put into the database: the guard, the host's functions, the audit log.

use super::Check;

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        "guard",
        "a transaction that the host did not complete cannot be committed",
        "SELECT 'error', 'the table of the commit guard is missing', NULL WHERE \
            to_regclass('oncebox.guard') IS NULL
         UNION ALL
         SELECT 'error', CASE WHEN t.tgname IS NULL THEN 'the trigger of the commit guard is \
            missing'
                    WHEN t.tgenabled NOT IN ('O', 'A') THEN 'the trigger of the commit guard is \
            disabled'
                    ELSE 'the trigger of the commit guard is not the one that this program makes' \
            END,
                CASE WHEN t.is_right AND t.tgenabled NOT IN ('O', 'A') THEN 'ALTER TABLE \
            oncebox.guard ENABLE TRIGGER guard' ELSE
                    'DROP TRIGGER IF EXISTS guard ON oncebox.guard; CREATE CONSTRAINT TRIGGER \
            guard AFTER INSERT ON oncebox.guard \
                     DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION \
                     oncebox.guard_check()' END
         FROM (SELECT) one LEFT JOIN LATERAL (
            SELECT g.tgname, g.tgenabled, g.tgdeferrable AND g.tginitdeferred AND g.tgtype = 5 AND \
            g.tgqual IS NULL
                AND g.tgfoid = to_regprocedure('oncebox.guard_check()') AS is_right
            FROM pg_trigger g WHERE g.tgrelid = to_regclass('oncebox.guard') AND g.tgname = \
            'guard') t ON true
         WHERE to_regclass('oncebox.guard') IS NOT NULL AND (t.is_right AND t.tgenabled IN ('O', \
            'A')) IS NOT TRUE",
    )
    .advice(
        "stop the hosts until it stands again: without it, the effect of a handler that \
        commits by itself is not undone",
    ),
    Check::new(
        "guard_rows",
        "no transaction was committed past the guard",
        "SELECT 'error', format('the guard holds %s rows, so as many transactions were committed \
            without being completed', count(*)), 'DELETE FROM oncebox.guard'
         FROM oncebox.guard HAVING count(*) > 0",
    )
    .advice(
        "find out how before you delete them: `xid` is the transaction's id, by which rows of \
        that time can be found",
    ),
    Check::new(
        "host_functions",
        "the host's functions belong to the owner of the inbox, and pin what they find by name",
        "SELECT 'error', format('%s belongs to `%s`, with whose rights it runs', \
            p.oid::regprocedure, pg_get_userbyid(p.proowner)),
                format('ALTER FUNCTION %s OWNER TO %I', p.oid::regprocedure, h.owner_name)
         FROM pg_proc p CROSS JOIN host h WHERE p.pronamespace::regnamespace::text IN ('oncebox', \
            'oncebox_host') AND p.proowner <> h.owner
         UNION ALL
         SELECT 'error', format('%s runs with the rights of its owner and does not pin its search \
            path: whoever calls it chooses what it finds', p.oid::regprocedure),
                format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', \
            p.oid::regprocedure)
         FROM pg_proc p WHERE p.pronamespace::regnamespace::text IN ('oncebox', 'oncebox_host') \
            AND p.prosecdef
           AND ('search_path=pg_catalog, pg_temp' = ANY (p.proconfig)) IS NOT TRUE",
    ),
    Check::new(
        "host_grants",
        "tenants may call the functions that hosts call for them, and nobody else any",
        "SELECT 'error', format('%s may execute %s of the host', g.name, p.oid::regprocedure), \
            format('REVOKE EXECUTE ON FUNCTION %s FROM %s', p.oid::regprocedure, g.name)
         FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a JOIN \
            grantee g ON g.oid = a.grantee
         WHERE p.pronamespace::regnamespace::text = 'oncebox' OR g.oid = 0 AND \
            p.pronamespace::regnamespace::text = 'oncebox_host'
         UNION ALL
         SELECT 'error', format('the sessions of tenant `%s` may not call %s functions of the \
            host, so that its messages are not run', l.tenant, count(*)),
                format('GRANT USAGE ON SCHEMA oncebox_host TO %1$I; GRANT EXECUTE ON ALL FUNCTIONS \
            IN SCHEMA oncebox_host TO %1$I', l.rolname)
         FROM login l, pg_proc p
         WHERE NOT l.is_owner AND p.pronamespace = 'oncebox_host'::regnamespace
           AND NOT (has_schema_privilege(l.oid, 'oncebox_host', 'USAGE') AND \
            has_function_privilege(l.oid, p.oid, 'EXECUTE'))
         GROUP BY l.tenant, l.rolname",
    ),
    Check::new(
        "audit_log",
        "rows of the audit log can be added, and neither changed nor taken away",
        "SELECT 'error', format('the trigger that keeps the audit log append-only is %s', CASE \
            WHEN t.tgname IS NULL THEN 'missing' WHEN t.is_whole THEN 'disabled' ELSE 'another' \
            END),
                CASE WHEN t.is_whole THEN 'ALTER TABLE oncebox.audit ENABLE TRIGGER append_only'
                     ELSE 'DROP TRIGGER IF EXISTS append_only ON oncebox.audit; CREATE TRIGGER \
            append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON oncebox.audit \
                     FOR EACH STATEMENT EXECUTE FUNCTION oncebox.audit_is_append_only()' END
         FROM (SELECT) one LEFT JOIN (SELECT *, tgtype = 58 AND tgqual IS NULL AND tgfoid = \
            to_regprocedure('oncebox.audit_is_append_only()') AS is_whole FROM pg_trigger) t
             ON t.tgrelid = to_regclass('oncebox.audit') AND t.tgname = 'append_only'
         WHERE to_regclass('oncebox.audit') IS NOT NULL AND (t.tgenabled IN ('O', 'A') AND \
            t.is_whole) IS NOT TRUE",
    )
    .advice("compare the log with a backup: it may have been changed since"),
    Check::new(
        "foreign_triggers",
        "the host's tables run no code but the host's",
        "SELECT 'error', format('the trigger `%s` of %s is not of this program, and runs with the \
            rights of whoever writes there', t.tgname, t.tgrelid::regclass),
                format('DROP TRIGGER %I ON %s', t.tgname, t.tgrelid::regclass)
         FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
         WHERE c.relnamespace IN (to_regnamespace('oncebox'), to_regnamespace('oncebox_host')) AND \
            NOT t.tgisinternal
           AND t.tgfoid::regproc::text NOT IN ('oncebox.guard_check', \
            'oncebox.audit_is_append_only')
         UNION ALL
         SELECT 'error', format('the rule `%s` of %s is not of this program', r.rulename, \
            r.ev_class::regclass), format('DROP RULE %I ON %s', r.rulename, r.ev_class::regclass)
         FROM pg_rewrite r JOIN pg_class c ON c.oid = r.ev_class
         WHERE c.relnamespace IN (to_regnamespace('oncebox'), to_regnamespace('oncebox_host')) AND \
            r.rulename <> '_RETURN'",
    ),
];
