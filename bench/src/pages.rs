//! The time of the console's pages beside a history: with many tenants and messages, as with few.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use oncebox_control::{NewToken, TokenRole};
use oncebox_devkit::{
    local::{free_port, process::Child},
    output::number,
};
use oncebox_tests::http;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use crate::{
    history::{Aged, LIVE, SETTINGS},
    report::Spread,
    run::{Bench, END},
    variants::{host, spawn},
};

/// Messages of the history, by default.
pub const ROWS: u64 = 10_000_000;
/// Tenants beside it, by default.
pub const TENANTS: usize = 500;
/// Messages of the database that the other is compared with, which has one tenant.
const FEW: i64 = 1_000;
/// Visits of each page that are measured, after some that are not.
const VISITS: usize = 20;
const WARM_UP: usize = 3;
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
/// Pages, below the address of the console. `{t}` is the tenant, `{c}` its consumer, `{m}` a message
/// of it.
const PAGES: [&str; 22] = [
    "",
    "/hosts",
    "/doctor",
    "/retention",
    "/audit",
    "/tokens",
    "{t}",
    "{t}/limits",
    "{t}/audit",
    "{t}/tokens",
    "{t}/handlers",
    "{t}/handlers/order",
    "{t}/outgoing",
    "{t}/jobs",
    "{t}/jobs/new?action=redrive&consumer=orders&status=parked",
    "{c}",
    "{c}/deployments/1",
    "{c}/failures",
    "{c}/lag",
    "{c}/messages",
    "{c}/messages?status=parked",
    "{c}/messages/{m}",
];

/// The times of all pages.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Pages {
    /// Messages of the history.
    pub rows: u64,
    /// Tenants beside it.
    pub tenants: usize,
    /// The pages.
    pub pages: Vec<PageTimes>,
}

/// The times of one page, from the request to its last byte, milliseconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PageTimes {
    /// Page, as in the list of pages.
    pub page: String,
    /// With one tenant and few messages.
    pub few: Spread,
    /// With many.
    pub many: Spread,
}

/// Measures every page with few messages, and then beside a history.
pub async fn measure(bench: &mut Bench, rows: u64, tenants: usize) -> Result<Pages> {
    let mut aged = Aged::create(bench, LIVE).await?;
    aged.grow(bench, "few messages", FEW).await?;
    let few = visit_all(bench, &aged).await?;
    let control = host::control(&bench.servers, &aged.database)?;
    for name in 1..tenants {
        control.tenants().create(&format!("tenant-{name}")).await?;
    }
    control.pool.close().await;
    let what = format!("history of {} messages", number(rows as i64));
    aged.grow(bench, &what, rows as i64).await?;
    let many = visit_all(bench, &aged).await?;
    bench.servers.drop_database(aged.database).await?;
    let times = PAGES.iter().zip(few).zip(many);
    let pages = times.map(|((page, few), many)| PageTimes { page: (*page).to_owned(), few, many });
    Ok(Pages { rows, tenants, pages: pages.collect() })
}

/// Visits every page of a host on this database, and returns the times of each.
async fn visit_all(bench: &Bench, aged: &Aged) -> Result<Vec<Spread>> {
    let address = format!("127.0.0.1:{}", free_port()?);
    let log = bench.logs.join("pages.log");
    let mut command = host::program(&bench.servers, &aged.database, &bench.programs, &log)?;
    command.envs(SETTINGS).env("ONCEBOX_API_LISTEN", &address);
    let child = spawn(command, &log)?;
    let visited = visit(bench, aged, &address, &child).await;
    child.end(&END);
    visited.with_context(|| format!("the host's log is `{}`", log.display()))
}

async fn visit(bench: &Bench, aged: &Aged, address: &str, child: &Child) -> Result<Vec<Spread>> {
    let tenant = &bench.servers.tenant.name;
    let control = host::control(&bench.servers, &aged.database)?;
    let new = NewToken { name: "bench", role: TokenRole::Admin, tenant: None, expires_at: None };
    let (_, secret) = control.tokens().create(&new).await?;
    let mut connection = aged.database.connect().await?;
    const MESSAGE: &str = "SELECT message_id FROM oncebox.inbox JOIN oncebox.consumer c \
        USING (consumer_id) WHERE c.name = $1 LIMIT 1";
    let query = sqlx::query_scalar(MESSAGE).bind(host::CONSUMER);
    let message: String =
        query.fetch_one(&mut connection).await.context("the history has no message")?;
    let cookie = sign_in(address, secret.reveal(), child).await?;
    let mut times = Vec::new();
    for page in PAGES {
        let consumer = format!("/tenants/{tenant}/consumers/{}", host::CONSUMER);
        let path = page
            .replace("{t}", &format!("/tenants/{tenant}"))
            .replace("{c}", &consumer)
            .replace("{m}", &message);
        let request = format!(
            "GET /console{path} HTTP/1.1\r\nHost: {address}\r\nCookie: {cookie}\r\n\
             Connection: close\r\n\r\n"
        );
        let mut measured = Vec::new();
        for visit in 0..WARM_UP + VISITS {
            let began = Instant::now();
            let answer = http::exchange(address, &request, PATIENCE).await;
            let answer = answer.with_context(|| format!("no answer from `{path}`"))?;
            ensure!(answer.starts_with("HTTP/1.1 200"), "`{path}`: {answer}");
            if visit >= WARM_UP {
                measured.push(began.elapsed().as_secs_f64() * 1_000.0);
            }
        }
        times.push(Spread::of(measured).context("visits")?);
    }
    control.pool.close().await;
    Ok(times)
}

/// Waits for the host, signs in, and returns the cookie of the session.
async fn sign_in(address: &str, token: &str, child: &Child) -> Result<String> {
    let deadline = Instant::now() + PATIENCE;
    while http::get(address, "/console/login", PATIENCE).await.is_none() {
        ensure!(child.is_running() && Instant::now() < deadline, "the host does not answer");
        sleep(POLL).await;
    }
    let body = format!("token={token}");
    let request = format!(
        "POST /console/login HTTP/1.1\r\nHost: {address}\r\nOrigin: http://{address}\r\n\
         Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    let answer = http::exchange(address, &request, PATIENCE).await.context("no answer")?;
    let cookie = answer.lines().find_map(|line| line.strip_prefix("set-cookie: "));
    let cookie = cookie.and_then(|cookie| cookie.split(';').next());
    Ok(cookie.with_context(|| format!("no session: {answer}"))?.to_owned())
}
