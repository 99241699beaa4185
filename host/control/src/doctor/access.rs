//! Grants of tenants' logins, or of PUBLIC and so of every login, on objects of others.

use super::Check;

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        "creation",
        "handlers can create nothing, temporary tables included, and tenants no schemas",
        "SELECT 'error', format('%s may %s in this database', g.name, CASE a.privilege_type WHEN \
            'CREATE' THEN 'create schemas' ELSE 'create temporary tables' END),
                format('REVOKE %s ON DATABASE %I FROM %s', a.privilege_type, d.datname, g.name)
         FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a JOIN \
            grantee g ON g.oid = a.grantee
         WHERE d.datname = current_database() AND a.privilege_type IN ('CREATE', 'TEMPORARY')
         UNION ALL
         SELECT 'error', format('%s may create objects in the schema `%s`', g.name, n.nspname), \
            format('REVOKE CREATE ON SCHEMA %I FROM %s', n.nspname, g.name)
         FROM pg_namespace n, aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a JOIN \
            grantee g ON g.oid = a.grantee
         WHERE a.privilege_type = 'CREATE' AND NOT (g.is_owner AND n.nspname = g.schema_name)",
    ),
    Check::new(
        "connect",
        "only logins that were let in reach this database, and tenants' logins no other",
        "SELECT 'warning', 'every login of the server may connect to this database', \
            format('REVOKE CONNECT ON DATABASE %I FROM PUBLIC', d.datname)
         FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a
         WHERE d.datname = current_database() AND a.grantee = 0 AND a.privilege_type = 'CONNECT'
         UNION ALL
         SELECT 'warning', format('tenants'' logins may connect to %s other databases of this \
            server, such as `%s`', count(*), min(d.datname)),
                string_agg(format('REVOKE CONNECT ON DATABASE %I FROM PUBLIC', d.datname), '; ' \
            ORDER BY d.datname)
         FROM pg_database d, aclexplode(coalesce(d.datacl, acldefault('d', d.datdba))) a
         WHERE d.datname <> current_database() AND d.datallowconn AND a.grantee = 0 AND \
            a.privilege_type = 'CONNECT' AND EXISTS (SELECT FROM login)
         HAVING count(*) > 0",
    )
    .advice("their passwords are known to hosts alone, so that this matters only when one leaks"),
    Check::new(
        "schemas",
        "of other schemas, tenants reach the host's functions alone",
        "SELECT CASE WHEN n.nspname IN ('oncebox', 'oncebox_host') OR n.nspname IN (SELECT \
            schema_name FROM tenant) THEN 'error' ELSE 'warning' END,
                format('%s may use the schema `%s`', g.name, n.nspname), format('REVOKE USAGE ON \
            SCHEMA %I FROM %s', n.nspname, g.name)
         FROM pg_namespace n, aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a JOIN \
            grantee g ON g.oid = a.grantee
         WHERE a.privilege_type = 'USAGE' AND n.nspname NOT IN ('pg_catalog', 'information_schema')
           AND n.nspname IS DISTINCT FROM g.schema_name AND NOT (n.nspname = 'oncebox_host' AND \
            g.oid <> 0)",
    )
    .advice(
        "what lives in such a schema, extensions included, is within reach of handlers; keep \
        it only when that is meant",
    ),
    Check::new(
        "tables",
        "nobody but its owner and its tenant has a grant on a table",
        "SELECT CASE WHEN n.nspname IN ('oncebox', 'oncebox_host') OR n.nspname IN (SELECT \
            schema_name FROM tenant) THEN 'error' ELSE 'warning' END,
                format('%s has %s on %I.%I', g.name, string_agg(a.privilege_type || coalesce(' (' \
            || quote_ident(a.attname) || ')', ''), ', '), n.nspname, c.relname),
                format('REVOKE %s ON %s %I.%I FROM %s', string_agg(a.privilege_type || coalesce(' \
            (' || quote_ident(a.attname) || ')', ''), ', '),
                    CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, n.nspname, \
            c.relname, g.name)
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace,
              LATERAL (SELECT x.grantee, x.privilege_type, NULL::name AS attname FROM \
            aclexplode(c.relacl) x
                       UNION ALL SELECT x.grantee, x.privilege_type, t.attname FROM pg_attribute \
            t, aclexplode(t.attacl) x
                       WHERE t.attrelid = c.oid AND t.attacl IS NOT NULL) a
              JOIN grantee g ON g.oid = a.grantee
         WHERE n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND n.nspname IS \
            DISTINCT FROM g.schema_name
         GROUP BY n.nspname, c.relname, c.relkind, g.name",
    ),
    Check::new(
        "catalog",
        "nothing of PostgreSQL's own was opened",
        "SELECT 'error', format('%s has %s on `%s`, which PostgreSQL does not give', g.name, \
            a.privilege_type, o.what),
                format('REVOKE %s ON %s %s FROM %s', a.privilege_type, o.kind, o.what, g.name)
         FROM (SELECT 'pg_class'::regclass AS classid, c.oid, 'TABLE' AS kind, \
            c.oid::regclass::text AS what, c.relacl AS acl, NULL::aclitem[] AS usual
               FROM pg_class c WHERE c.relnamespace IN ('pg_catalog'::regnamespace, \
            'information_schema'::regnamespace) AND c.relacl IS NOT NULL
               UNION ALL
               SELECT 'pg_proc'::regclass, p.oid, 'FUNCTION', p.oid::regprocedure::text, p.proacl, \
            acldefault('f', p.proowner)
               FROM pg_proc p WHERE p.pronamespace IN ('pg_catalog'::regnamespace, \
            'information_schema'::regnamespace) AND p.proacl IS NOT NULL
              ) o CROSS JOIN LATERAL aclexplode(o.acl) a JOIN grantee g ON g.oid = a.grantee
              LEFT JOIN pg_init_privs i ON i.objoid = o.oid AND i.classoid = o.classid AND \
            i.objsubid = 0
         WHERE NOT EXISTS (SELECT FROM aclexplode(coalesce(i.initprivs, o.usual)) u WHERE \
            u.grantee = a.grantee AND u.privilege_type = a.privilege_type)
           AND NOT (o.kind = 'FUNCTION' AND o.oid IN ({revoked}))
           -- initdb keeps no record of the views of the information schema, which everybody may \
            read.
           AND NOT (o.what LIKE 'information_schema.%' AND a.grantee = 0 AND a.privilege_type = \
            'SELECT')",
    ),
    Check::new(
        "parameters",
        "no tenant may change a setting of the server",
        "SELECT 'error', format('%s has %s on the setting `%s`', g.name, a.privilege_type, \
            p.parname), format('REVOKE %s ON PARAMETER %s FROM %s', a.privilege_type, p.parname, \
            g.name)
         FROM pg_parameter_acl p, aclexplode(p.paracl) a JOIN grantee g ON g.oid = a.grantee",
    )
    .since(150_000),
    Check::new(
        "reached_functions",
        "no function that runs with its owner's rights is within reach of handlers",
        "SELECT DISTINCT ON (p.oid) 'error', format('handlers can call %s, which runs with the \
            rights of `%s`', p.oid::regprocedure, pg_get_userbyid(p.proowner)),
                format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', p.oid::regprocedure)
         FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace, login l
         WHERE p.prosecdef AND n.nspname NOT IN ('oncebox', 'oncebox_host', 'pg_catalog', \
            l.schema_name)
           AND has_schema_privilege(l.oid, n.oid, 'USAGE') AND has_function_privilege(l.oid, \
            p.oid, 'EXECUTE')",
    ),
];
