//! `oncebox apply`: the state of tenants, consumers and deployments as a file. What could go wrong:
//! a second run changes something again, a plan says something else than is done, half of a file is
//! applied before its mistake is found, or something that nobody named is taken away. The same over
//! the API of a server as on the database itself.

use oncebox_tests::{
    cli::{Access, CliFixture},
    guests::{self, End},
};
use serde_json::{Value, json};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../guest-examples/github-demo.toml");

const FILE: &str = "
[[tenant]]
name = 'acme'
migrations = ['1-stock.sql']

[[tenant.consumer]]
name = 'orders'
policy = { topics = ['orders'], ack = 'after_commit' }

[[tenant.consumer.deployment]]
event_type = 'order.placed'
component = 'ok.wasm'
handler = 'orders'
settings = { colour = 'red', size = 3 }
requires_migration = '1-stock'

[[tenant.consumer.deployment]]
event_type = 'order.placed'
event_versions = '>=2'
component = 'ok.wasm'
handler = 'orders'
retries = 'pinned'
";

/// A folder with the file and what it names.
async fn furnished(way: Access) -> CliFixture {
    let cli = CliFixture::open(way).await;
    cli.file("ok.wasm", guests::component(&[], &End::Ok));
    cli.file("other.wasm", guests::component(&[guests::execute("SELECT 1")], &End::Ok));
    cli.file("1-stock.sql", "CREATE TABLE stock (sku text);");
    cli.file("x.toml", FILE);
    cli
}

/// The lines of a plan, without what differs from run to run.
fn plan(printed: &str) -> Vec<&str> {
    printed.lines().collect()
}

async fn check_demo_twice(way: Access) {
    let cli = CliFixture::open(way).await;
    let first = cli.ok(&["apply", "-f", DEMO]).await;
    assert!(first.ends_with("36 created, 0 changed, 0 unchanged\n"), "{first}");
    assert_eq!(
        first.lines().filter(|line| line.starts_with("+ deployment")).count(),
        18,
        "{first}"
    );
    let (audit, state) = (cli.audit().await, cli.state().await);
    let second = cli.ok(&["apply", "-f", DEMO]).await;
    assert!(
        second.ends_with("no changes\n")
            && second.lines().rev().skip(1).all(|line| line.starts_with("= ")),
        "{second}"
    );
    assert_eq!(
        (cli.audit().await, cli.state().await),
        (audit, state),
        "the second run wrote something"
    );
    let third = cli.json(&["apply", "-f", DEMO]).await;
    assert_eq!((&third["created"], &third["changed"]), (&json!(0), &json!(0)));
    let deployments =
        cli.json(&["deployments", "--tenant", "globex", "--consumer", "github"]).await;
    assert_eq!(deployments.as_array().unwrap().len(), 9, "{deployments}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demos_file_twice_on_the_database() {
    check_demo_twice(Access::Database).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demos_file_twice_over_a_server() {
    check_demo_twice(Access::Server).await;
}

/// The file that docs/apply.md shows, as it stands there.
#[tokio::test(flavor = "multi_thread")]
async fn the_file_of_the_page_is_applied() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let sample = format!("{folder}/samples/apply.toml");
    let page = std::fs::read_to_string(format!("{folder}/apply.md")).unwrap();
    assert!(
        page.contains(&std::fs::read_to_string(&sample).unwrap()),
        "the page shows another file than the sample"
    );
    let mut cli = CliFixture::open(Access::Database).await;
    // The operator allows the host of the endpoint first.
    cli.file("host.toml", "[http_destinations]\nhosts_allowed = ['api.payments.example']\n");
    let config = cli.dir().join("host.toml").display().to_string();
    cli.folder().set("ONCEBOX_CONFIG", &config);
    cli.ok(&["tenant", "create", "shop"]).await;
    let hosts = ["--endpoint-hosts-allowed", "api.payments.example"];
    cli.ok(&[&["tenant", "limits", "shop"][..], &hosts].concat()).await;
    let missing = "endpoint `pay` of tenant `shop`: the secret in PAY_TOKEN is missing: environment \
        variable not found";
    let said = cli.run(&["apply", "-f", &sample]).await;
    assert!(said.code == Some(1) && said.stderr.contains(missing), "{}", said.stderr);
    cli.folder().set("PAY_TOKEN", "Bearer s3cr3t");
    let first = cli.ok(&["apply", "-f", &sample]).await;
    assert!(first.ends_with("created, 0 changed, 1 unchanged\n"), "{first}");
    assert!(first.contains("+ endpoint   shop pay\n") && !first.contains("s3cr3t"), "{first}");
    let live = cli.json(&["deployments"]).await;
    let reserves = |row: &Value| row["event_type"] == json!("inventory.reserve");
    assert!(live.as_array().unwrap().iter().any(reserves), "{live}");
    // Another secret is a change, which is named and not shown.
    cli.folder().set("PAY_TOKEN", "Bearer other-s3cr3t");
    let changed = cli.ok(&["apply", "-f", &sample]).await;
    assert!(changed.contains("~ endpoint   shop pay") && !changed.contains("s3cr3t"), "{changed}");
    assert_eq!(cli.ok(&["apply", "-f", &sample]).await.lines().last(), Some("no changes"));
}

/// What could go wrong: a plan says that a memory is raised, which only the creation does; the raise
/// is silent; or the file of a consumer whose memory was raised cannot be applied again.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_memory_was_raised_is_applied_again() {
    const RAISING: &str = "
[[tenant]]
name = 'acme'
[[tenant.consumer]]
name = 'orders'
[tenant.consumer.policy]
topics = ['orders']
ack = 'after_commit'
replay = { horizon = 'raise' }
factors = { replay_days = 5 }
";
    let cli = CliFixture::open(Access::Database).await;
    cli.file("raising.toml", RAISING);
    let dry = cli.ok(&["apply", "-f", "raising.toml", "--dry-run"]).await;
    assert!(
        dry.contains("its memory would be raised, to `30d` at most") && !dry.contains("is raised"),
        "{dry}"
    );
    let made = cli.ok(&["apply", "-f", "raising.toml"]).await;
    let warning = "warning: consumer `acme/orders`: the memory is raised from `7d` to `30d`";
    assert!(made.contains(warning), "{made}");
    let again = cli.ok(&["apply", "-f", "raising.toml"]).await;
    assert!(again.ends_with("no changes\n") && !again.contains("raised"), "{again}");
    cli.file("policy.toml", RAISING.split("[tenant.consumer.policy]").last().unwrap());
    let set =
        ["consumer", "policy", "set", "orders", "--tenant", "acme", "--policy", "policy.toml"];
    let set = cli.ok(&[&set[..], &["--wait", "0"]].concat()).await;
    assert!(set.contains("is that already"), "{set}");
    let explained = cli.json(&["retention", "explain", "orders", "--tenant", "acme"]).await;
    assert_eq!((&explained["retention"], &explained["raise_to"]), (&json!("30d"), &json!(null)));
}

async fn check_changes(way: Access) {
    let cli = furnished(way).await;
    let before = cli.state().await;
    let dry = cli.ok(&["apply", "-f", "x.toml", "--dry-run"]).await;
    assert_eq!(cli.state().await, before, "a dry run did something");
    let digest = cli.digest("ok.wasm");
    assert_eq!(
        plan(&dry),
        [
            "+ tenant     acme",
            &format!("+ version    acme/orders {digest} (ok.wasm)"),
            "+ migration  acme 1-stock",
            "+ consumer   acme/orders",
            "+ deployment acme/orders `order.placed`",
            "+ deployment acme/orders `order.placed` in versions `>=2`",
            "6 to be created, 0 to be changed, 0 unchanged",
        ]
    );
    let done = cli.ok(&["apply", "-f", "x.toml"]).await;
    assert_eq!(done, dry.replace(" to be ", " "));
    let live = cli.json(&["deployments", "--tenant", "acme"]).await;
    let live: Vec<_> = live
        .as_array()
        .unwrap()
        .iter()
        .map(|d| json!([d["event_versions"], d["settings"], d["requires_migration"], d["retries"]]))
        .collect();
    assert!(
        live.contains(&json!([null, { "colour": "red", "size": 3 }, "1-stock", "live"])),
        "{live:?}"
    );
    assert!(live.contains(&json!([">=2", {}, null, "pinned"])), "{live:?}");

    // Another component, another setting, a migration more, and what nobody names any more stays.
    cli.file("2-more.sql", "ALTER TABLE stock ADD COLUMN n int;");
    let file = FILE
        .replacen("'1-stock.sql'", "'1-stock.sql', '2-more.sql'", 1)
        .replacen("ok.wasm", "other.wasm", 1)
        .replacen("'red'", "'blue'", 1);
    let file = file.rsplit_once("[[tenant.consumer.deployment]]").unwrap().0.to_owned();
    cli.file("x.toml", file);
    let other = cli.digest("other.wasm");
    let changed = cli.ok(&["apply", "-f", "x.toml"]).await;
    assert_eq!(
        plan(&changed),
        [
            "= tenant     acme",
            &format!("+ version    acme/orders {other} (other.wasm)"),
            "= migration  acme 1-stock",
            "+ migration  acme 2-more",
            "= consumer   acme/orders",
            &format!(
                "~ deployment acme/orders `order.placed`: version {digest} → {other}, settings \
                    `colour` \"red\" → \"blue\""
            ),
            "2 created, 1 changed, 3 unchanged",
        ]
    );
    let live = cli.json(&["deployments", "--tenant", "acme"]).await;
    assert_eq!(live.as_array().unwrap().len(), 2, "something was taken away: {live}");
    let again = cli.json(&["apply", "-f", "x.toml"]).await;
    assert_eq!(
        again["changes"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|change| change["action"] != "unchanged")
            .count(),
        0,
        "{again}"
    );

    // By digest, without the file.
    let file = std::fs::read_to_string(cli.dir().join("x.toml")).unwrap();
    cli.file("x.toml", file.replace("component = 'other.wasm'", &format!("version = '{other}'")));
    assert!(cli.ok(&["apply", "-f", "x.toml"]).await.ends_with("no changes\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_planned_and_carried_out_on_the_database() {
    check_changes(Access::Database).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_are_planned_and_carried_out_over_a_server() {
    check_changes(Access::Server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_applied_is_told_before_anything_is_done() {
    let cli = furnished(Access::Database).await;
    cli.fails(
        &["apply", "-f", "nowhere.toml"],
        "failed to read `nowhere.toml`: No such file or directory (os error 2)",
    )
    .await;
    cli.file("y.toml", FILE.replace("retries =", "retry ="));
    let expected = "expected one of `event_type`, `event_versions`, `handler`, `component`, \
        `version`, `settings`, `limits`, `requires_migration`, `retries`, `grants`";
    cli.fails(
        &["apply", "-f", "y.toml"],
        &format!("`y.toml` cannot be applied, line 22: unknown field `retry`, {expected}"),
    )
    .await;
    cli.file("y.toml", FILE.replace("ack =", "ackk ="));
    let output = cli.run(&["apply", "-f", "y.toml"]).await;
    assert!(
        output
            .stderr
            .starts_with("error: `y.toml` cannot be applied, line 8: unknown field `ackk`"),
        "{}",
        output.stderr
    );

    cli.ok(&["apply", "-f", "x.toml"]).await;
    // A new tenant comes first in the file, and is not made when what follows is wrong.
    let first = "[[tenant]]\nname = 'first'\n";
    cli.file("y.toml", format!("{first}{}", FILE.replace("'after_commit'", "'after_insert'")));
    cli.fails(
        &["apply", "-f", "y.toml"],
        "the policy of consumer `acme/orders` is another: `ack` \"after_commit\" → \
            \"after_insert\"; change it with `oncebox consumer policy set`, which says what \
            follows for messages",
    )
    .await;
    cli.file("1-stock.sql", "CREATE TABLE stock (sku int);");
    cli.file("y.toml", format!("{first}{FILE}"));
    cli.fails(
        &["apply", "-f", "y.toml"],
        "migration `1-stock` of tenant `acme` was applied with another text than `1-stock.sql` \
            has; write what is new as a migration of its own",
    )
    .await;
    cli.file("1-stock.sql", "CREATE TABLE stock (sku text);");
    cli.file(
        "y.toml",
        format!("{first}{}", FILE.replacen("component = 'ok.wasm'", "version = 'abcdef012345'", 1)),
    );
    cli.fails(
        &["apply", "-f", "y.toml"],
        "handler `orders` of tenant `acme` has no version `abcdef012345`; `oncebox version list` \
            shows those there are",
    )
    .await;
}

/// A component that is refused stops everything before the tenant's tables are touched.
#[tokio::test(flavor = "multi_thread")]
async fn a_component_that_is_refused_stops_before_the_migrations() {
    let cli = furnished(Access::Database).await;
    cli.file("2-more.sql", "ALTER TABLE stock ADD COLUMN n int;");
    cli.ok(&["apply", "-f", "x.toml"]).await;
    cli.file("bad.wasm", "hello");
    cli.file(
        "y.toml",
        FILE.replacen("'1-stock.sql'", "'1-stock.sql', '2-more.sql'", 1)
            .replacen("ok.wasm", "bad.wasm", 1),
    );
    let output = cli.run(&["apply", "-f", "y.toml"]).await;
    assert_eq!(
        (output.code, output.stderr.as_str()),
        (
            Some(1),
            "error: `bad.wasm` cannot be deployed: this is not a WebAssembly file; upload the \
                `.wasm` file that your compiler writes\n"
        )
    );
    let migrations: Vec<Value> =
        cli.rows("SELECT to_jsonb(name) FROM oncebox.tenant_migration").await;
    assert_eq!(migrations, [json!("1-stock")]);
}
