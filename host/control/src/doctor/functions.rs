//! Functions of PostgreSQL that reach past a role, and languages.
//!
//! Revoking them from PUBLIC needs their owner, a superuser. Where there is none, functions by
//! which a tenant can disturb others stay errors. Functions that disturb only its own session are
//! warnings, since the host has other safeguards.

use super::Check;

/// Advice where no available login may revoke.
const MANAGED: &str = "the statements need a superuser, or whoever acts as one at the provider. \
    Where nobody may carry them out, hosts still \
    refuse statements other than SELECT, INSERT, UPDATE, DELETE, MERGE, VALUES, TABLE and WITH, \
    end statements by a timer of their own, and the \
    commit guard stands; what is named here stays open. Give tenants that do not trust each other \
    a database server of their own";

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        "functions_between_tenants",
        "functions that take locks, notify, or keep large objects are closed to tenants",
        "SELECT 'error', format('%s may execute %s functions by which a tenant can block or fill \
            up what all share, such as `%s`', g.name, count(*), min(f.what)),
                {close}
         FROM (SELECT p.oid, p.proname, p.oid::regprocedure::text AS what, p.proacl, p.proowner \
            FROM pg_proc p WHERE p.oid IN ({revoked})) f
              CROSS JOIN LATERAL aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) a \
            JOIN grantee g ON g.oid = a.grantee CROSS JOIN host h
         WHERE f.proname ~ \
            '^(pg_(try_)?advisory_|lo_|lo(read|write)|pg_notify|pg_logical_emit_message|pg_export_snapshot|pg_lock_status|pg_get_|pg_partition_tree|pg_sequence_last_value|fmgr_sql_validator|plpgsql_validator)'
         GROUP BY g.name, g.oid, h.owner_name, h.login_name",
    )
    .advice(MANAGED),
    Check::new(
        "functions_of_the_session",
        "functions that change settings, sleep, end sessions or run texts are closed to tenants",
        "SELECT CASE WHEN bool_and(pg_has_role(session_user, f.proowner, 'USAGE')) OR g.oid <> 0 \
            THEN 'error' ELSE 'warning' END,
                format('%s may execute %s functions by which a handler can change its own session, \
            such as `%s`', g.name, count(*), min(f.what)),
                {close}
         FROM (SELECT p.oid, p.proname, p.oid::regprocedure::text AS what, p.proacl, p.proowner \
            FROM pg_proc p WHERE p.oid IN ({revoked})) f
              CROSS JOIN LATERAL aclexplode(coalesce(f.proacl, acldefault('f', f.proowner))) a \
            JOIN grantee g ON g.oid = a.grantee CROSS JOIN host h
         WHERE f.proname !~ \
            '^(pg_(try_)?advisory_|lo_|lo(read|write)|pg_notify|pg_logical_emit_message|pg_export_snapshot|pg_lock_status|pg_get_|pg_partition_tree|pg_sequence_last_value|fmgr_sql_validator|plpgsql_validator)'
         GROUP BY g.name, g.oid, h.owner_name, h.login_name",
    )
    .advice(MANAGED),
    Check::new(
        "languages",
        "no language is open, so that a tenant's schema holds no code",
        "SELECT CASE WHEN g.oid = 0 AND pg_has_role(session_user, l.lanowner, 'USAGE') THEN \
            'error' ELSE 'warning' END,
                format('%s may write functions in `%s`', g.name, l.lanname),
                format('GRANT USAGE ON LANGUAGE %I TO %I, %I; REVOKE USAGE ON LANGUAGE %I FROM \
            %s', l.lanname, h.owner_name, h.login_name, l.lanname, g.name)
         FROM pg_language l, aclexplode(coalesce(l.lanacl, acldefault('l', l.lanowner))) a JOIN \
            grantee g ON g.oid = a.grantee CROSS JOIN host h
         -- Functions in the others are a superuser's to make, whatever the grants say.
         WHERE l.lanpltrusted",
    )
    .advice(
        "whoever may write functions can NOTIFY and LISTEN, change settings of its session and the \
            password of its own login, and run code in \
         triggers, also at COMMIT; always as itself, and never past the commit guard. Grant it to \
         tenants that you trust with that",
    ),
];
