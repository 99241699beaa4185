//! The database's cost of finding out whether a message is new, without any effect. The host's
//! claim is compared with the two ways that are usual by hand. pgbench sends the statements.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use oncebox_control::{Credentials, MasterKey};
use serde::{Deserialize, Serialize};
use sqlx::Connection;

use crate::{
    measure::{Parties, Sampler, now_us},
    run::Bench,
    servers::Database,
    variants::{host, pgbench},
};

const TRANSACTIONS: usize = 5_000;
const BATCH: usize = 64;
/// Transactions of the host's claim in a database with a history, for new messages and for known
/// ones each. They leave few messages beside the history.
const BESIDE_HISTORY: usize = 400;
/// Ids of the messages of transaction `:i`, the `g`th of each: in the order of the claims, or as
/// UUIDs, which are anywhere in an index.
const NUMBERED: &str = "'m-' || :i || '-' || g";
const RANDOM: &str = "md5('claim ' || :i || ' ' || g)::uuid::text";

/// Cost of one way to claim.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClaimCost {
    /// The way to claim.
    pub way: Way,
    /// Whether the messages are known already.
    pub duplicates: bool,
    /// Messages in a transaction.
    pub batch: usize,
    /// Statements per message, of the claim and the completion.
    pub statements_each: f64,
    /// CPU time of the database per message, microseconds.
    pub cpu_us: f64,
    /// Write-ahead log per message, bytes.
    pub wal_bytes: f64,
}

/// The host's claim on one database: CPU time of the database per message, microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HostClaim {
    /// Of messages that are new.
    pub new_us: f64,
    /// Of messages that are known.
    pub known_us: f64,
}

/// A way to claim a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// The host's functions `claim` and `complete`, with the guard.
    Oncebox,
    /// The same with light rows.
    OnceboxLight,
    /// `INSERT … ON CONFLICT DO NOTHING`, then `UPDATE`.
    OnConflict,
    /// `SELECT … FOR UPDATE`, then `INSERT`, then `UPDATE`.
    ForUpdate,
}

impl Way {
    fn is_host(self) -> bool {
        matches!(self, Self::Oncebox | Self::OnceboxLight)
    }

    /// Returns the name that tables show.
    pub fn title(self) -> &'static str {
        match self {
            Self::Oncebox => "oncebox: claim and complete",
            Self::OnceboxLight => "oncebox: claim and complete, light rows",
            Self::OnConflict => "INSERT … ON CONFLICT, UPDATE",
            Self::ForUpdate => "SELECT … FOR UPDATE, INSERT, UPDATE",
        }
    }
}

/// The claims of a run of pgbench.
#[derive(Clone, Copy)]
struct Claims {
    way: Way,
    /// Messages in a transaction.
    batch: usize,
    /// Whether the messages are known already.
    duplicates: bool,
    transactions: usize,
    /// Number before that of the first transaction.
    after: usize,
    /// Ids of the host's claims: `NUMBERED` or `RANDOM`.
    ids: &'static str,
}

/// Measures every way, for new messages and for duplicates; the host's also in batches.
pub async fn measure(bench: &mut Bench) -> Result<Vec<ClaimCost>> {
    let mut costs = Vec::new();
    for (way, batch) in [
        (Way::ForUpdate, 1),
        (Way::OnConflict, 1),
        (Way::Oncebox, 1),
        (Way::Oncebox, BATCH),
        (Way::OnceboxLight, BATCH),
    ] {
        let database = bench.servers.database(way.is_host()).await?;
        let url = match way.is_host() {
            true => tenant_url(bench, &database).await?,
            false => database.url.clone(),
        };
        // The second run claims the messages of the first again.
        for duplicates in [false, true] {
            let what = || format!("the claim `{}`", way.title());
            let transactions = if batch == 1 { TRANSACTIONS } else { TRANSACTIONS / 8 };
            let claims = Claims { way, batch, duplicates, transactions, after: 0, ids: NUMBERED };
            costs.push(run(bench, &database, &url, claims).await.with_context(what)?);
        }
        bench.servers.drop_database(database).await?;
    }
    Ok(costs)
}

/// Measures the host's claim, in batches and with random ids, on a database that holds its consumer
/// and that no host works on. `round` counts the calls for this database.
pub async fn beside_history(bench: &Bench, database: &Database, round: usize) -> Result<HostClaim> {
    let url = login_url(bench, database).await?;
    let new = Claims {
        way: Way::Oncebox,
        batch: BATCH,
        duplicates: false,
        transactions: BESIDE_HISTORY,
        after: round * BESIDE_HISTORY,
        ids: RANDOM,
    };
    let known = Claims { duplicates: true, ..new };
    Ok(HostClaim {
        new_us: run(bench, database, &url, new).await?.cpu_us,
        known_us: run(bench, database, &url, known).await?.cpu_us,
    })
}

async fn run(bench: &Bench, database: &Database, url: &str, claims: Claims) -> Result<ClaimCost> {
    let Claims { way, batch, duplicates, transactions, after, .. } = claims;
    let statements = statements(bench, claims)?;
    let statements_each =
        statements.lines().filter(|line| !line.starts_with('\\')).count() as f64 / batch as f64;
    let script = bench.logs.join("claim.sql");
    std::fs::write(&script, statements).context("failed to write a script")?;
    let mut command = Command::new(pgbench::program().context("there is no `pgbench`")?);
    command.args([
        "--no-vacuum",
        "--protocol=prepared",
        "--transactions",
        &transactions.to_string(),
        "--define",
        &format!("i={after}"),
        "--file",
    ]);
    command.arg(script).arg(url).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());

    let (postmaster, broker) = bench.servers.pids()?;
    let wal = |bytes: i64, before: i64| (bytes - before) as f64;
    let before = database.wal_position().await?;
    let child = command.spawn().context("failed to start `pgbench`")?;
    let sampler =
        Sampler::start(Parties { consumer: child.id() as i32, database: postmaster, broker });
    let begun = now_us();
    let output = tokio::task::spawn_blocking(move || child.wait_with_output()).await??;
    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    let cpu = sampler.finish()?.between(begun, now_us());
    ensure!(
        output.status.success(),
        "`pgbench` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    let messages = (transactions * batch) as f64;
    let wal_bytes = wal(database.wal_position().await?, before) / messages;
    Ok(ClaimCost {
        way,
        duplicates,
        batch,
        statements_each,
        cpu_us: cpu.database / messages,
        wal_bytes,
    })
}

/// Creates a consumer to claim for, and returns the URL of [`login_url`].
async fn tenant_url(bench: &Bench, database: &Database) -> Result<String> {
    host::create_claimant(&bench.servers, database).await?;
    login_url(bench, database).await
}

/// Returns a URL of the tenant's own login, which the host uses too.
async fn login_url(bench: &Bench, database: &Database) -> Result<String> {
    let (_, rest) =
        database.url.split_once("://").context("a database URL starts with `postgres://`")?;
    let (_, server) = rest.split_once('@').context("a superuser's URL has a password")?;
    let login = &bench.servers.tenant.login;
    let password = credentials(bench)?.guest_password;
    let url = format!("postgres://{login}:{password}@{server}");
    sqlx::PgConnection::connect(&url)
        .await
        .context("failed to log in as the tenant")?
        .close()
        .await?;
    Ok(url)
}

/// Returns the script of a transaction: one statement a line. Lines that begin with a backslash are
/// for pgbench itself.
fn statements(bench: &Bench, claims: Claims) -> Result<String> {
    let id = "'m-' || :i";
    let known = "SELECT done FROM processed WHERE message_id = 'm-' || :i FOR UPDATE;";
    let insert =
        format!("INSERT INTO processed (message_id) VALUES ({id}) ON CONFLICT DO NOTHING;");
    let done = format!("UPDATE processed SET done = true WHERE message_id = {id};");
    let lines = match (claims.way, claims.duplicates) {
        (Way::Oncebox, _) => return oncebox(bench, claims, false),
        (Way::OnceboxLight, _) => return oncebox(bench, claims, true),
        (Way::OnConflict, false) => vec![insert, done],
        (Way::OnConflict, true) => vec![insert],
        (Way::ForUpdate, false) => vec![known.to_owned(), insert, done],
        (Way::ForUpdate, true) => vec![known.to_owned()],
    };
    Ok(format!("\\set i :i + 1\nBEGIN;\n{}\nCOMMIT;\n", lines.join("\n")))
}

/// Returns a script that calls the host's functions as the host does. BEGIN travels alone here, and
/// with RESET ALL in the host: one message to the server in both.
fn oncebox(bench: &Bench, claims: Claims, is_light: bool) -> Result<String> {
    let Claims { batch, ids, .. } = claims;
    let secret: String =
        credentials(bench)?.secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let nulls = |of: &str| format!("array_fill(NULL::{of}, ARRAY[{batch}])");
    let (texts, bytes) = (nulls("text"), nulls("bytea"));
    let numbers = format!("array_fill(0::bigint, ARRAY[{batch}])");
    let ids = format!("(SELECT array_agg({ids}) FROM generate_series(1, {batch}) AS g)");
    let sources = format!("array_fill('orders'::text, ARRAY[{batch}])");
    let hashes = format!("array_fill(sha256('x'), ARRAY[{batch}])");
    let versions = format!("array_fill(1, ARRAY[{batch}])");
    Ok(format!(
        "\\set i :i + 1\n\
         BEGIN READ WRITE;\n\
         SELECT outcome FROM oncebox_host.claim('\\x{secret}'::bytea, 1, 1, 'completed', \
         {texts}, 'orders', 0, {ids}, {numbers}, {numbers}, \
         {bytes}, {bytes}, {sources}, {sources}, {texts}, {texts}, {texts}, {hashes}, {versions}, \
         {bytes}, {bytes}, NULL, NULL, p_light => {is_light});\n\
         SELECT oncebox_host.complete('\\x{secret}'::bytea, 1, '{{}}', '{{}}', '{{}}', '{{}}', \
         '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}');\n\
         COMMIT;\n"
    ))
}

fn credentials(bench: &Bench) -> Result<Credentials> {
    Ok(MasterKey::parse(&bench.servers.master_key)?.credentials(&bench.servers.tenant)?)
}
