//! Everything in the database that is not the attacker's, as text, to compare.

use std::collections::BTreeMap;

use super::fixture::HostileFixture;

/// What hosts write of themselves, and what the victim's load writes.
const OWN_BUSINESS: &[&str] = &[
    "oncebox.host",
    "oncebox.host_consumer",
    "oncebox.probation",
    "oncebox.partition_position",
    // What the host survived of starting a consumer.
    "oncebox.consumer_start",
    "oncebox.start_mark",
    // How many deliveries they refused.
    "oncebox.duplicates_refused",
    "oncebox.guard",
    "oncebox.inbox",
    "oncebox.inbox_history",
    "oncebox.deployment_outcome",
];

/// By what it is.
pub async fn foreign(fixture: &HostileFixture) -> BTreeMap<String, Vec<String>> {
    let mut dump = BTreeMap::new();
    for (schema, table) in tables(fixture).await {
        let name = format!("{schema}.{table}");
        if OWN_BUSINESS.contains(&name.as_str())
            || schema == fixture.victim.schema_name
                && ["account", "ledger_entry"].contains(&table.as_str())
        {
            continue;
        }
        // The attacker's attempts are in the log of changes, and what it was allowed in its own
        // rows; hosts raise what consumers require.
        let own = match table.as_str() {
            "audit" => " WHERE t.tenant IS DISTINCT FROM 'mallory'",
            "tenant_migration" => &format!(" WHERE t.tenant_id <> {}", fixture.attacker.tenant_id),
            _ => "",
        };
        let sql = format!(
            "SELECT (to_jsonb(t) - 'generation_required')::text FROM {name} t{own} ORDER BY 1"
        );
        dump.insert(name, fixture.texts(&sql).await);
    }
    let (attacker, owner, schema) =
        (&fixture.attacker.login, &fixture.attacker.owner_login, &fixture.attacker.schema_name);
    for (what, sql) in [
        (
            "inbox",
            format!(
                "SELECT to_jsonb(t)::text FROM oncebox.inbox t WHERE consumer_id = {} \
            ORDER BY 1",
                fixture.still
            ),
        ),
        (
            "history",
            format!(
                "SELECT to_jsonb(t)::text FROM oncebox.inbox_history t WHERE \
            consumer_id = {} ORDER BY 1",
                fixture.still
            ),
        ),
        (
            "roles",
            format!(
                "SELECT (to_jsonb(t) - CASE WHEN rolname = '{attacker}' THEN \
            'rolpassword' ELSE '' END)::text FROM pg_authid t ORDER BY oid"
            ),
        ),
        ("members", "SELECT t::text FROM pg_auth_members t ORDER BY 1".to_owned()),
        ("settings", "SELECT t::text FROM pg_db_role_setting t ORDER BY 1".to_owned()),
        (
            "databases",
            "SELECT (to_jsonb(t) - 'datfrozenxid' - 'datminmxid')::text FROM pg_database \
            t ORDER BY oid"
                .to_owned(),
        ),
        (
            "schemas",
            format!(
                "SELECT t::text FROM pg_namespace t WHERE nspname <> '{schema}' ORDER \
            BY oid"
            ),
        ),
        (
            "grants",
            format!(
                "SELECT concat_ws(' ', oid::regclass, relacl) FROM pg_class WHERE \
            relnamespace <> '{schema}'::regnamespace AND relnamespace <> 'pg_toast'::regnamespace \
            ORDER BY oid"
            ),
        ),
        (
            "columns",
            format!(
                "SELECT concat_ws(' ', a.attrelid::regclass, a.attname, a.atttypid) \
            FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid WHERE c.relnamespace NOT IN \
            ('{schema}'::regnamespace, 'pg_toast'::regnamespace) ORDER BY a.attrelid, a.attnum"
            ),
        ),
        (
            "functions",
            format!(
                "SELECT concat_ws(' ', oid::regprocedure, md5(prosrc), proacl) FROM \
            pg_proc WHERE pronamespace <> '{schema}'::regnamespace ORDER BY oid"
            ),
        ),
        (
            "triggers",
            format!(
                "SELECT concat_ws(' ', g.tgrelid::regclass, g.tgname, g.tgenabled) \
            FROM pg_trigger g JOIN pg_class c ON c.oid = g.tgrelid WHERE c.relnamespace <> \
            '{schema}'::regnamespace ORDER BY g.oid"
            ),
        ),
        ("languages", "SELECT t::text FROM pg_language t ORDER BY oid".to_owned()),
        (
            "extensions",
            "SELECT t::text FROM pg_extension t UNION ALL SELECT t::text FROM \
            pg_event_trigger t UNION ALL SELECT t::text FROM pg_publication t UNION ALL SELECT \
            t::text FROM pg_foreign_server t"
                .to_owned(),
        ),
        ("large objects", "SELECT t::text FROM pg_largeobject_metadata t".to_owned()),
        ("prepared transactions", "SELECT gid FROM pg_prepared_xacts".to_owned()),
        (
            "what the attacker owns elsewhere",
            format!(
                "SELECT d.classid::regclass || ' ' || pg_describe_object(d.classid, d.objid, \
                d.objsubid) FROM pg_shdepend d JOIN pg_roles r ON r.oid = d.refobjid \
             WHERE d.deptype = 'o' AND r.rolname IN ('{attacker}', '{owner}') AND d.dbid IN (0, \
             (SELECT oid FROM pg_database WHERE datname = current_database())) \
               AND (pg_identify_object(d.classid, d.objid, d.objsubid)).schema IS DISTINCT FROM \
               '{schema}' ORDER BY 1"
            ),
        ),
    ] {
        dump.insert(what.to_owned(), fixture.texts(&sql).await);
    }
    dump
}

async fn tables(fixture: &HostileFixture) -> Vec<(String, String)> {
    let sql = "SELECT n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON \
        n.oid = c.relnamespace \
        WHERE n.nspname IN ('oncebox', 'oncebox_host', $1) AND c.relkind IN ('r', 'p') AND NOT \
        c.relispartition ORDER BY 1, 2";
    sqlx::query_as(sql).bind(&fixture.victim.schema_name).fetch_all(&fixture.pool).await.unwrap()
}

/// What is not the same.
pub fn differences(
    before: &BTreeMap<String, Vec<String>>,
    after: &BTreeMap<String, Vec<String>>,
) -> Vec<String> {
    let names: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
    let changed = names.into_iter().filter(|name| before.get(*name) != after.get(*name));
    changed
        .map(|name| {
            let (old, new) = (
                before.get(name).cloned().unwrap_or_default(),
                after.get(name).cloned().unwrap_or_default(),
            );
            let gone: Vec<_> = old.iter().filter(|row| !new.contains(row)).take(5).collect();
            let come: Vec<_> = new.iter().filter(|row| !old.contains(row)).take(5).collect();
            format!("`{name}` changed: gone {gone:#?}, come {come:#?}")
        })
        .collect()
}
