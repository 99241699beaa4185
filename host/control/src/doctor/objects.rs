//! Objects that tenants, and operators for them, put into a tenant's schema, and whatever else the
//! database runs or reaches.

use super::Check;

pub(super) const CHECKS: &[Check] = &[
    Check::new(
        "rules",
        "no table of a tenant has a rule",
        "SELECT 'error', format('the rule `%s` of %I.%I rewrites statements of tenant `%s`, NOTIFY \
            included', r.rulename, n.nspname, c.relname, t.name),
                format('DROP RULE %I ON %I.%I', r.rulename, n.nspname, c.relname)
         FROM pg_rewrite r JOIN pg_class c ON c.oid = r.ev_class JOIN pg_namespace n ON n.oid = \
            c.relnamespace JOIN tenant t ON t.schema_name = n.nspname
         WHERE r.rulename <> '_RETURN'",
    ),
    Check::new(
        "foreign_rights",
        "nothing in a tenant's schema runs with rights that are not the tenant's",
        "SELECT 'error', format('%s in the schema of tenant `%s` runs with the rights of `%s`', \
            p.oid::regprocedure, t.name, pg_get_userbyid(p.proowner)),
                format('ALTER FUNCTION %s SECURITY INVOKER; ALTER FUNCTION %1$s OWNER TO %I', \
            p.oid::regprocedure, t.owner_login)
         FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN tenant t ON \
            t.schema_name = n.nspname
         WHERE p.prosecdef AND pg_get_userbyid(p.proowner) <> t.owner_login
         UNION ALL
         SELECT 'error', format('%I.%I in the schema of tenant `%s` belongs to `%s`%s', n.nspname, \
            c.relname, t.name, pg_get_userbyid(c.relowner),
                    CASE WHEN c.relkind IN ('v', 'm') THEN ', with whose rights it reads' ELSE '' \
            END),
                format('ALTER TABLE %I.%I OWNER TO %I', n.nspname, c.relname, t.owner_login)
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN tenant t ON \
            t.schema_name = n.nspname
         WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND pg_get_userbyid(c.relowner) <> \
            t.owner_login
         UNION ALL
         SELECT 'error', format('the schema of tenant `%s` belongs to `%s`', t.name, \
            pg_get_userbyid(n.nspowner)), format('ALTER SCHEMA %I OWNER TO %I', n.nspname, \
            t.owner_login)
         FROM pg_namespace n JOIN tenant t ON t.schema_name = n.nspname WHERE \
            pg_get_userbyid(n.nspowner) <> t.owner_login
         UNION ALL
         SELECT 'warning', format('%s lets the handlers of tenant `%s` do what the owner of its \
            schema may, DDL included', p.oid::regprocedure, t.name),
                format('ALTER FUNCTION %s SECURITY INVOKER', p.oid::regprocedure)
         FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN tenant t ON \
            t.schema_name = n.nspname
         WHERE p.prosecdef AND pg_get_userbyid(p.proowner) = t.owner_login",
    ),
    Check::new(
        "foreign_triggers_of_tenants",
        "triggers of tenants' tables call what is in the tenant's schema or came with PostgreSQL \
            or with Oncebox",
        "SELECT 'error', format('the trigger `%s` of %I.%I calls %s, which is not of tenant `%s`', \
            g.tgname, n.nspname, c.relname, p.oid::regprocedure, t.name),
                format('DROP TRIGGER %I ON %I.%I', g.tgname, n.nspname, c.relname)
         FROM pg_trigger g JOIN pg_class c ON c.oid = g.tgrelid JOIN pg_namespace n ON n.oid = \
            c.relnamespace JOIN tenant t ON t.schema_name = n.nspname
              JOIN pg_proc p ON p.oid = g.tgfoid JOIN pg_namespace f ON f.oid = p.pronamespace
         WHERE NOT g.tgisinternal AND f.nspname NOT IN (n.nspname, 'pg_catalog') AND NOT \
            (f.nspname = 'oncebox_host' AND p.proname = 'capture_row')",
    ),
    Check::new(
        "event_triggers",
        "no event trigger runs beside what tenants and the host define",
        "SELECT 'warning', format('the event trigger `%s` runs %s whenever a tenant or the host \
            changes the schema', e.evtname, e.evtfoid::regprocedure),
                format('ALTER EVENT TRIGGER %I DISABLE', e.evtname)
         FROM pg_event_trigger e WHERE e.evtenabled <> 'D'",
    )
    .advice("event triggers are a superuser's; keep one only where its function holds against what \
        a tenant's migration makes it see"),
    Check::new(
        "extensions",
        "no extension that everybody may use reaches files, the network or other sessions",
        "SELECT 'error', format('everybody may execute %s functions of the extension `%s`, such as \
            %s, which reaches out of the database', count(*), e.extname, \
            min(p.oid::regprocedure::text)),
                format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', \
            string_agg(p.oid::regprocedure::text, ', '))
         FROM pg_extension e JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND \
            d.refobjid = e.oid AND d.classid = 'pg_proc'::regclass AND d.deptype = 'e'
              JOIN pg_proc p ON p.oid = d.objid
         WHERE e.extname IN ('dblink', 'postgres_fdw', 'file_fdw', 'adminpack', 'lo', 'pg_cron', \
            'pg_net', 'http', 'plpythonu', 'plpython3u', 'plperlu',
                    'pltclu', 'pg_background', 'pageinspect', 'aws_s3', 'aws_lambda', 'orafce', \
            'pg_prewarm', 'xml2')
           AND EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a \
            WHERE a.grantee = 0)
         GROUP BY e.extname",
    )
    .advice("the list is of extensions that are known to reach out; of others, look at what PUBLIC \
        may execute"),
    Check::new(
        "foreign_servers",
        "tenants reach no foreign server or wrapper",
        "SELECT 'error', format('%s may use the foreign server `%s`', g.name, s.srvname), \
            format('REVOKE USAGE ON FOREIGN SERVER %I FROM %s', s.srvname, g.name)
         FROM pg_foreign_server s, aclexplode(s.srvacl) a JOIN grantee g ON g.oid = a.grantee
         UNION ALL
         SELECT 'error', format('%s may use the foreign-data wrapper `%s`', g.name, w.fdwname), \
            format('REVOKE USAGE ON FOREIGN DATA WRAPPER %I FROM %s', w.fdwname, g.name)
         FROM pg_foreign_data_wrapper w, aclexplode(w.fdwacl) a JOIN grantee g ON g.oid = a.grantee
         UNION ALL
         SELECT 'error', format('`%s` of tenant `%s` has a user mapping for the foreign server \
            `%s`', l.rolname, l.tenant, m.srvname),
                format('DROP USER MAPPING FOR %I SERVER %I', l.rolname, m.srvname)
         FROM pg_user_mappings m JOIN login l ON l.oid = m.umuser
         UNION ALL
         SELECT 'error', format('PUBLIC has a user mapping for the foreign server `%s`', \
            m.srvname), format('DROP USER MAPPING FOR PUBLIC SERVER %I', m.srvname)
         FROM pg_user_mappings m WHERE m.umuser = 0
         UNION ALL
         SELECT 'warning', format('the foreign table %I.%I is in the schema of tenant `%s`', \
            n.nspname, c.relname, t.name), format('DROP FOREIGN TABLE %I.%I', n.nspname, c.relname)
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN tenant t ON \
            t.schema_name = n.nspname WHERE c.relkind = 'f'",
    ),
];
