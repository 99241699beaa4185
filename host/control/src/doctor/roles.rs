//! The two logins of each tenant: their attributes, memberships, settings and owned objects.

use super::Check;

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        "roles",
        "both logins of every tenant exist",
        "SELECT 'error', format('the login `%s` of tenant `%s` does not exist', wanted, t.name), \
            NULL
         FROM tenant t, unnest(ARRAY[t.login, t.owner_login]) AS wanted
         WHERE NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = wanted)",
    )
    .advice(
        "roles are no part of a dump of a database; restore them with `pg_dumpall \
        --roles-only`",
    ),
    Check::new(
        "memberships",
        "the tenants' logins are members of nothing, and nothing but the host's own login is a \
            member of them",
        "SELECT 'error', format('`%s` of tenant `%s` is a member of `%s` and can become it', \
            l.rolname, l.tenant, r.rolname),
                format('REVOKE %I FROM %I', r.rolname, l.rolname)
         FROM pg_auth_members m JOIN login l ON l.oid = m.member JOIN pg_roles r ON r.oid = m.roleid
         UNION ALL
         SELECT 'error', format('`%s` can become `%s` of tenant `%s`', r.rolname, l.rolname, \
            l.tenant), format('REVOKE %I FROM %I', l.rolname, r.rolname)
         FROM pg_auth_members m JOIN login l ON l.oid = m.roleid JOIN pg_roles r ON r.oid = \
            m.member, host h
         WHERE r.oid NOT IN (h.login, h.owner) AND NOT r.rolsuper AND r.oid NOT IN (SELECT oid \
            FROM login)
         UNION ALL
         SELECT 'error', format('`%s` can become `%s`, which owns the inbox', r.rolname, \
            h.owner_name), format('REVOKE %I FROM %I', h.owner_name, r.rolname)
         FROM host h JOIN pg_auth_members m ON m.roleid = h.owner JOIN pg_roles r ON r.oid = \
            m.member
         WHERE r.oid <> h.login AND NOT r.rolsuper AND r.oid NOT IN (SELECT oid FROM login)",
    )
    .advice(
        "where a host has another login than the one that looks now, what it is a member of is \
        right",
    ),
    Check::new(
        "attributes",
        "the tenants' logins have no attribute but LOGIN, and the owner of the inbox has none",
        "SELECT 'error', format('`%s` of tenant `%s` is %s', l.rolname, l.tenant, a.name), \
            format('ALTER ROLE %I NO%s', l.rolname, a.name)
         FROM login l, LATERAL (VALUES ('SUPERUSER', l.rolsuper), ('CREATEROLE', l.rolcreaterole), \
            ('CREATEDB', l.rolcreatedb),
                ('REPLICATION', l.rolreplication), ('BYPASSRLS', l.rolbypassrls)) AS a(name, has) \
            WHERE a.has
         UNION ALL
         SELECT 'warning', format('`%s` of tenant `%s` is INHERIT', l.rolname, l.tenant), \
            format('ALTER ROLE %I NOINHERIT', l.rolname)
         FROM login l WHERE l.rolinherit
         UNION ALL
         SELECT 'error', format('`%s` of tenant `%s` may not log in', l.rolname, l.tenant), \
            format('ALTER ROLE %I LOGIN VALID UNTIL ''infinity''', l.rolname)
         FROM login l WHERE NOT l.rolcanlogin OR l.rolvaliduntil < now()
         UNION ALL
         SELECT 'error', format('`%s`, which owns the inbox, is %s', r.rolname, a.name), \
            format('ALTER ROLE %I NO%s', r.rolname, a.name)
         FROM host h JOIN pg_roles r ON r.oid = h.owner, LATERAL (VALUES ('SUPERUSER', \
            r.rolsuper), ('CREATEROLE', r.rolcreaterole),
                ('CREATEDB', r.rolcreatedb), ('REPLICATION', r.rolreplication), ('BYPASSRLS', \
            r.rolbypassrls), ('LOGIN', r.rolcanlogin)) AS a(name, has)
         WHERE a.has",
    ),
    Check::new(
        "ownership",
        "a tenant's handlers own nothing, and its owner login nothing but its schema",
        "SELECT 'error', format('`%s` of tenant `%s` owns %s', l.rolname, l.tenant,
                    CASE WHEN o.object IS NULL THEN 'something in another database' ELSE \
            format('the %s %s', o.type, o.identity) END),
                CASE WHEN o.type IN ('table', 'view', 'materialized view', 'sequence', 'function', \
            'procedure', 'aggregate', 'schema', 'type', 'foreign table', 'database')
                     THEN format('ALTER %s %s OWNER TO %I', upper(o.type), o.identity, CASE WHEN \
            o.schema = l.schema_name THEN l.owner_login ELSE h.login_name END)
                     WHEN o.type = 'large object' THEN format('SELECT lo_unlink(%s)', o.identity) \
            END
         FROM login l CROSS JOIN host h JOIN pg_shdepend d ON d.refclassid = 'pg_authid'::regclass \
            AND d.refobjid = l.oid AND d.deptype = 'o'
         LEFT JOIN LATERAL (
            SELECT d.objid AS object, i.type, i.schema, i.name, i.identity FROM \
            pg_identify_object(d.classid, d.objid, d.objsubid) i
            WHERE d.dbid IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))) \
            o ON true
         WHERE NOT (l.is_owner AND o.object IS NOT NULL
            AND (o.schema = l.schema_name OR o.type = 'schema' AND o.name = l.schema_name OR \
            o.type = 'default acl'
                -- A trigger, rule or policy is in the schema of its table.
                OR o.schema IS NULL AND split_part(o.identity, ' on ', 2) LIKE l.schema_name || \
            '.%'))",
    ),
    Check::new(
        "role_settings",
        "the tenants' logins default to what they were created with",
        "SELECT 'error', format('the handlers of tenant `%s` do not default to read-only \
            transactions', l.tenant),
                format('ALTER ROLE %I SET default_transaction_read_only = on', l.rolname)
         FROM login l WHERE NOT l.is_owner AND NOT EXISTS (
            SELECT FROM pg_db_role_setting s WHERE s.setrole = l.oid AND s.setdatabase = 0 AND \
            'default_transaction_read_only=on' = ANY (s.setconfig))
         UNION ALL
         SELECT CASE WHEN e.name IN ('session_replication_role', 'default_transaction_read_only', \
            'log_parameter_max_length',
                    'log_parameter_max_length_on_error', 'role', 'synchronous_commit') THEN \
            'error' ELSE 'warning' END,
                format('`%s` of tenant `%s` has the setting `%s`, which Oncebox did not give it', \
            l.rolname, l.tenant, e.setting),
                format('ALTER ROLE %I%s RESET %I', l.rolname, coalesce(' IN DATABASE ' || \
            quote_ident(d.datname), ''), e.name)
         FROM pg_db_role_setting s JOIN login l ON l.oid = s.setrole LEFT JOIN pg_database d ON \
            d.oid = s.setdatabase,
              LATERAL (SELECT split_part(c, '=', 1), c FROM unnest(s.setconfig) c) AS e(name, \
            setting)
         WHERE e.setting NOT IN ('log_parameter_max_length=0', 'default_transaction_read_only=on')
           AND NOT (e.name IN ('temp_file_limit', 'deadlock_timeout') AND s.setdatabase = 0)
           AND e.setting <> 'search_path=' || l.schema_name
         UNION ALL
         SELECT 'error', format('every session of %s begins with `%s`, so that the commit guard \
            does not fire', coalesce(d.datname, 'the server'), c),
                format('ALTER ROLE ALL%s RESET session_replication_role', coalesce(' IN DATABASE ' \
            || quote_ident(d.datname), ''))
         FROM pg_db_role_setting s LEFT JOIN pg_database d ON d.oid = s.setdatabase, \
            unnest(s.setconfig) c
         WHERE s.setrole = 0 AND c LIKE 'session_replication_role=%' AND (d.datname = \
            current_database() OR s.setdatabase = 0)",
    ),
    Check::new(
        "temporary_files",
        "what handlers and migrations may spill to disk is bounded",
        "SELECT 'warning', format('temporary files of the %s of tenant `%s` are not bounded: one \
            query can fill the disk',
                       CASE WHEN l.is_owner THEN 'migrations' ELSE 'handlers' END, l.tenant),
                format('ALTER ROLE %I SET temp_file_limit = ''256MB''', l.rolname)
         FROM login l WHERE current_setting('temp_file_limit') = '-1' AND NOT EXISTS (
            SELECT FROM pg_db_role_setting s, unnest(s.setconfig) c WHERE s.setrole = l.oid AND c \
            LIKE 'temp_file_limit=%' AND c <> 'temp_file_limit=-1')",
    )
    .advice(
        "only a superuser may set it; where there is none, watch the disk, and give strangers \
        a database of their own",
    ),
];
