//! The same commands through the API of a server. What could go wrong: a token goes over the wire
//! in the clear or into a log, a certificate is not checked, a server that is away or is none
//! leaves a person with a riddle, or a command does something else than it does on the database.

use std::{net::TcpListener, process::Command};

use oncebox_devkit::local::free_port;
use oncebox_tests::{
    cli::{Access, CliFixture},
    guests::{self, End},
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const TOKEN: &str = "obx_not-a-token-of-this-server";

/// Something that answers every request in the same way, and is no server of ours.
async fn stranger(answer: &'static str) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4096]).await; // whatever is asked
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_be_used_is_named() {
    let mut cli = CliFixture::open(Access::Database).await;
    let closed = format!("http://127.0.0.1:{}", free_port().unwrap());
    let html = stranger(
        "HTTP/1.1 404 Not Found\r\ncontent-type: text/html\r\ncontent-length: \
        13\r\n\r\n<html></html>",
    )
    .await;
    let fine = stranger(
        "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 13\r\n\r\n<html></html>",
    )
    .await;
    let ssh = stranger("SSH-2.0-OpenSSH_9.2\r\n").await;
    let wrong = |url: &str| {
        format!(
            "`{url}` is not the URL of a server; it is that of its API (`api.listen`), such as \
                https://oncebox.example:9465"
        )
    };
    let unknown = |url: &str, status: u16| {
        format!(
            "the server at `{url}` answered {status} in a way that this program does not \
                understand; check `--server` (ONCEBOX_SERVER)"
        )
    };
    let check = "check `--server` (ONCEBOX_SERVER)";
    for (url, line) in [
        (
            closed.as_str(),
            format!(
                "the server at `{closed}` is not reachable; {check}: Connection refused (os error \
                    111)"
            ),
        ),
        (&html, unknown(&html, 404)),
        (&ftp(), wrong(&ftp())),
        (
            "http://me:secret@127.0.0.1",
            "the URL of a server holds no password; use `--token-file` or ONCEBOX_TOKEN".to_owned(),
        ),
    ] {
        cli.fails(&["tenant", "list", "--server", url], &line).await;
    }
    for (url, beginning) in [
        (&fine, unknown(&fine, 200)),
        (&ssh, format!("the server at `{ssh}` did not answer as a server does; {check}: ")),
        (
            &closed.replace("http", "https"),
            format!(
                "the server at `{}` is not reachable; {check}: ",
                closed.replace("http", "https")
            ),
        ),
        (
            &html.replace("http", "https"),
            format!(
                "no secure connection to `{}`; `--ca-file` names a private authority: ",
                html.replace("http", "https")
            ),
        ),
    ] {
        let said = cli.run(&["tenant", "list", "--server", url]).await;
        assert!(
            said.code == Some(1)
                && said.stderr.starts_with(&format!("error: {beginning}"))
                && said.stderr.lines().count() == 1,
            "{}",
            said.stderr
        );
    }
    cli.fails(
        &["migrate", "--server", &html],
        "this command works on this machine and not through a server; leave `--server` out",
    )
    .await;

    // A token leaves this machine only where nobody can read along.
    cli.folder().set("ONCEBOX_TOKEN", TOKEN);
    let line = "the token is not sent to `192.0.2.1` over plain http, since that is another \
        machine; use https";
    cli.fails(&["tenant", "list", "--server", "http://192.0.2.1:9465"], line).await;
    cli.folder().set("ONCEBOX_TOKEN", "two words");
    let line = "the token is not one: a token is one word of printable characters; see \
        `--token-file` and ONCEBOX_TOKEN";
    cli.fails(&["tenant", "list", "--server", &html], line).await;
    let line = "failed to read the token from `nowhere`: No such file or directory (os error 2)";
    cli.fails(&["tenant", "list", "--server", &html, "--token-file", "nowhere"], line).await;
}

fn ftp() -> String {
    "ftp://127.0.0.1".to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_decides_what_a_command_may_do() {
    let mut cli = CliFixture::open(Access::Server).await;
    cli.ok(&["tenant", "create", "acme"]).await;
    cli.ok(&["tenant", "create", "globex"]).await;
    let viewer = cli
        .json(&[
            "token",
            "create",
            "looker",
            "--role",
            "viewer",
            "--tenant",
            "acme",
            "--expires",
            "1",
        ])
        .await;
    let token = viewer["token"].as_str().unwrap().to_owned();
    assert_eq!((&viewer["role"], &viewer["tenant"]), (&json!("viewer"), &json!("acme")));
    // In words: the token alone on standard output.
    let said = cli.run(&["token", "create", "ci@example", "--role", "deployer"]).await;
    assert_eq!(
        (said.stdout.lines().count(), said.stdout.split_whitespace().count()),
        (1, 1),
        "{}",
        said.stdout
    );
    assert!(
        said.stderr.starts_with("token ") && !said.stderr.contains(said.stdout.trim()),
        "{}",
        said.stderr
    );
    let listed = cli.ok(&["token", "list"]).await;
    assert!(
        listed.contains("looker") && listed.contains("deployer") && !listed.contains(&token),
        "{listed}"
    );

    let control = cli.folder().get("ONCEBOX_TOKEN").unwrap();
    cli.folder().unset("ONCEBOX_TOKEN");
    refused(&cli, &["tenant", "list"], "token").await;
    cli.folder().set("ONCEBOX_TOKEN", TOKEN);
    refused(&cli, &["tenant", "list"], "the token is not known here").await;
    // From a file, as a person keeps it.
    cli.folder().unset("ONCEBOX_TOKEN");
    cli.file("token", format!("{token}\n"));
    let with: &[&str] = &["--token-file", "token"];
    assert_eq!(
        cli.json(&[&["consumer", "list", "--tenant", "acme"], with].concat()).await,
        json!([])
    );
    refused(
        &cli,
        &[&["consumer", "list", "--tenant", "globex"], with].concat(),
        "tenant `acme` only",
    )
    .await;
    let storage = cli.json(&[&["storage"], with].concat()).await;
    assert_eq!(keys(&storage, &["tenant", "consumers"]), json!(["acme", []]));
    let others = [&["storage", "--tenant", "globex"], with].concat();
    refused(&cli, &others, "tenant `acme` only").await;
    refused(&cli, &[&["tenant", "create", "third"], with].concat(), "").await;
    cli.file("ok.wasm", guests::component(&[], &End::Ok));
    refused(
        &cli,
        &[&["version", "upload", "ok.wasm", "--tenant", "acme"], with].concat(),
        "`deployer`",
    )
    .await;

    cli.folder().set("ONCEBOX_TOKEN", &control);
    let id = viewer["token_id"].to_string();
    assert_eq!(
        cli.ok(&["token", "revoke", &id]).await,
        format!("token {id} of `looker` is revoked\n")
    );
    refused(&cli, &[&["consumer", "list", "--tenant", "acme"], with].concat(), "revoked").await;
    let log = std::fs::read_to_string(cli.dir().join("server.log")).unwrap();
    assert!(
        !log.contains(&token) && !log.contains(&control) && !log.contains(TOKEN),
        "a token is in the log"
    );
    let audit = cli.json(&["audit", "--limit", "3"]).await;
    assert_eq!(
        (&audit[0]["action"], &audit[0]["actor"]),
        (&json!("token.revoke"), &json!("tester")),
        "{audit}"
    );
}

/// Brokers know nothing of tenants: what a tenant's token may name keeps it from the others'
/// topics, groups and offsets.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_token_names_its_own_topics_and_groups_alone() {
    let mut cli = CliFixture::open(Access::Server).await;
    cli.ok(&["tenant", "create", "acme"]).await;
    let shown = cli.ok(&["tenant", "limits", "acme", "--topics-allowed", "acme.*, shared"]).await;
    assert!(shown.contains("topics_allowed          acme.*, shared"), "{shown}");
    refused(
        &cli,
        &["tenant", "limits", "acme", "--topics-allowed", "^.*"],
        "`topics_allowed` is [\"^.*\"]; it must be a list",
    )
    .await;
    let given = "kafka:acme.*, inbox:billing";
    let shown = cli.ok(&["tenant", "limits", "acme", "--destinations-allowed", given]).await;
    assert!(shown.contains(&format!("destinations_allowed    {given}")), "{shown}");
    refused(
        &cli,
        &["tenant", "limits", "acme", "--destinations-allowed", "https://example.com"],
        "`destinations_allowed`: `https://example.com` is no destination",
    )
    .await;
    let of_tenant =
        cli.json(&["token", "create", "theirs", "--role", "admin", "--tenant", "acme"]).await;
    let platform = cli.folder().get("ONCEBOX_TOKEN").unwrap();
    cli.folder().set("ONCEBOX_TOKEN", of_tenant["token"].as_str().unwrap());
    let create = |name: &'static str| {
        ["consumer", "create", name, "--tenant", "acme", "--policy", "policy.toml"]
    };
    let policy = |cli: &CliFixture, topics: &str, more: &str| {
        cli.file("policy.toml", format!("topics = [{topics}]\nack = 'after_commit'\n{more}"));
    };
    for (topics, more, part) in [
        ("'acme.orders', 'globex.orders'", "", "`acme` may not read topic `globex.orders`"),
        ("'share'", "", "may not read topic `share`"),
        ("'^acme.*'", "", "may not read topic `^acme.*`"),
        (
            "'shared'",
            "kafka = { group = 'oncebox.globex.orders' }",
            "only to what begins with `oncebox.acme.`",
        ),
        (
            "'shared'",
            "kafka = { properties = { 'bootstrap.servers' = 'elsewhere:9092' } }",
            "cannot set `policy.kafka.properties`",
        ),
    ] {
        policy(&cli, topics, more);
        refused(&cli, &create("theirs"), part).await;
    }
    policy(&cli, "'acme.orders', 'shared'", "");
    cli.ok(&create("theirs")).await;
    policy(&cli, "'acme.orders', 'globex.orders'", "");
    refused(
        &cli,
        &[
            "consumer",
            "policy",
            "set",
            "theirs",
            "--tenant",
            "acme",
            "--policy",
            "policy.toml",
            "--yes",
        ],
        "globex.orders",
    )
    .await;
    refused(&cli, &["tenant", "limits", "acme", "--topics-allowed", "none"], "").await;

    // Whoever runs the host is not bound.
    cli.folder().set("ONCEBOX_TOKEN", &platform);
    cli.ok(&create("given")).await;
}

/// A command that is refused with one line that holds this, and changes nothing.
async fn refused(cli: &CliFixture, arguments: &[&str], part: &str) {
    let before = (cli.state().await, cli.audit().await);
    let said = cli.run(arguments).await;
    assert!(
        said.code == Some(1) && said.stderr.contains(part) && said.stderr.lines().count() == 1,
        "{arguments:?}: {}",
        said.stderr
    );
    assert_eq!((cli.state().await, cli.audit().await), before, "{arguments:?} changed something");
}

/// What could go wrong: a person whose token is of one tenant has to name it each time, or a name
/// that was left out is taken for another than the only one.
async fn check_left_out(way: Access) {
    let mut cli = CliFixture::open(way).await;
    cli.file("policy.toml", "topics = ['oncebox.acme.orders']\nack = 'after_commit'\n");
    cli.file("ok.wasm", guests::component(&[], &End::Ok));
    let create = ["consumer", "create", "orders", "--policy", "policy.toml"];
    refused(&cli, &create, "there is no tenant yet; `oncebox tenant create` makes one").await;
    cli.ok(&["tenant", "create", "acme"]).await;
    let deploy = ["deploy", "ok.wasm", "--event-type", "order.placed"];
    refused(
        &cli,
        &deploy,
        "there is no consumer of tenant `acme` yet; `oncebox consumer create` makes one",
    )
    .await;
    cli.ok(&create).await;
    let deployed = cli.json(&deploy).await;
    assert_eq!(deployed["event_type"], json!("order.placed"));
    assert_eq!(cli.json(&["consumer", "show", "orders"]).await["tenant"], json!("acme"));
    assert_eq!(cli.json(&["tenant", "show"]).await["name"], json!("acme"));
    // An id that looks like an option stays an id.
    let said = cli.run(&["inbox", "show", "--", "-1"]).await;
    assert!(said.stderr.contains("`-1`") && !said.stderr.contains("--tenant"), "{}", said.stderr);
    // What else is missing is told by its name alone.
    let said = cli.run(&["inbox", "show"]).await;
    assert!(said.code == Some(2) && said.stderr.contains("<MESSAGE_ID>"), "{}", said.stderr);

    cli.ok(&["tenant", "create", "globex"]).await;
    let line = "`--tenant` is needed, since there is more than one tenant: `acme`, `globex`";
    refused(&cli, &deploy, line).await;
    refused(&cli, &["tenant", "show"], line).await;
    cli.ok(&[&deploy[..], &["--tenant", "acme"]].concat()).await;
    cli.ok(&["consumer", "create", "second", "--tenant", "acme", "--policy", "policy.toml"]).await;
    let line = "`--consumer` is needed, since there is more than one consumer of tenant `acme`: \
        `orders`, `second`";
    refused(&cli, &[&deploy[..], &["--tenant", "acme"]].concat(), line).await;
    if way == Access::Database {
        return;
    }

    // A tenant's token sees its own tenant alone, so that it never needs to be named.
    let of_tenant =
        cli.json(&["token", "create", "theirs", "--role", "admin", "--tenant", "globex"]).await;
    cli.folder().set("ONCEBOX_TOKEN", of_tenant["token"].as_str().unwrap());
    cli.file("policy.toml", "topics = ['oncebox.globex.orders']\nack = 'after_commit'\n");
    cli.ok(&create).await;
    cli.ok(&deploy).await;
    for (command, names) in [
        (&["tenant", "list"][..], "name"),
        (&["consumer", "list"], "tenant"),
        (&["deployments"], "tenant"),
        (&["token", "list"], "tenant"),
    ] {
        let listed = cli.json(command).await;
        let listed = listed.as_array().unwrap();
        assert!(
            !listed.is_empty() && listed.iter().all(|row| row[names] == json!("globex")),
            "{command:?}: {listed:?}"
        );
    }
    assert_eq!(cli.json(&["tenant", "show"]).await["name"], json!("globex"));
    assert!(cli.json(&["audit"]).await.as_array().is_some_and(|entries| !entries.is_empty()));
    assert_eq!(cli.json(&["inbox", "list"]).await, json!([]));
    let own = cli.json(&["token", "create", "second", "--role", "viewer"]).await;
    assert_eq!(own["tenant"], json!("globex"));
    cli.ok(&["token", "revoke", &own["token_id"].to_string()]).await;
    let said = cli.run(&["why", "m-1"]).await;
    assert!(
        said.stderr.contains("the inbox of `globex/orders` holds no message `m-1`"),
        "{}",
        said.stderr
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_the_only_one_may_be_left_out_on_the_database() {
    check_left_out(Access::Database).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_the_only_one_may_be_left_out_over_a_server() {
    check_left_out(Access::Server).await;
}

/// A certificate of a private authority is taken with `--ca-file` and refused without.
#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_is_checked() {
    let mut cli = CliFixture::open(Access::Database).await;
    let made = Command::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
        ])
        .args([
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
        ])
        .current_dir(cli.dir())
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let port = free_port().unwrap();
    let mut server = Command::new("openssl")
        .args([
            "s_server",
            "-accept",
            &format!("127.0.0.1:{port}"),
            "-key",
            "key.pem",
            "-cert",
            "cert.pem",
            "-WWW",
            "-quiet",
        ])
        .current_dir(cli.dir())
        .spawn()
        .unwrap();
    while TcpListener::bind(("127.0.0.1", port)).is_ok() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    cli.folder().set("ONCEBOX_TOKEN", TOKEN);
    let url = format!("https://localhost:{port}");
    let without = cli.run(&["tenant", "list", "--server", &url]).await;
    // What answers is no server of ours, but it is reached.
    let with = cli.run(&["tenant", "list", "--server", &url, "--ca-file", "cert.pem"]).await;
    let other = cli.run(&["tenant", "list", "--server", &url, "--ca-file", "key.pem"]).await;
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(
        without.stderr.starts_with(&format!(
            "error: no secure connection to `{url}`; `--ca-file` names a private authority: "
        )),
        "{}",
        without.stderr
    );
    assert!(without.stderr.contains("certificate verify failed"), "{}", without.stderr);
    assert!(with.stderr.starts_with(&format!("error: the server at `{url}` ")), "{}", with.stderr);
    assert!(
        other.stderr.starts_with("error: `key.pem` holds no certificates in PEM"),
        "{}",
        other.stderr
    );
}

/// What every command prints for programs, on either way.
async fn check_shapes(way: Access) {
    let cli = CliFixture::open(way).await;
    cli.file("schema.sql", "CREATE TABLE t (n int);");
    cli.file("policy.toml", "topics = ['orders']\nack = 'after_commit'\n");
    cli.file("ok.wasm", guests::component(&[], &End::Ok));
    cli.file("new.wasm", guests::component(&[guests::execute("SELECT 1")], &End::Ok));
    let of: &[&str] = &["--tenant", "acme", "--consumer", "orders", "--event-type", "order.placed"];
    let (ok, new) = (cli.digest("ok.wasm"), cli.digest("new.wasm"));

    assert_eq!(
        keys(
            &cli.json(&["tenant", "create", "acme", "--schema", "schema.sql"]).await,
            &["name", "schema_name"]
        ),
        json!(["acme", "*"])
    );
    cli.json(&["consumer", "create", "orders", "--tenant", "acme", "--policy", "policy.toml"])
        .await;
    cli.file("more.sql", "ALTER TABLE t ADD COLUMN m int;");
    let migrated = cli.json(&["tenant", "schema", "apply", "acme", "schema.sql", "more.sql"]).await;
    assert_eq!(migrated, json!({ "applied": ["more"], "known": ["schema"] }));
    let said = cli.ok(&["tenant", "schema", "apply", "acme", "schema.sql", "more.sql"]).await;
    assert_eq!(said, "tenant `acme` holds all of them already\n");

    let version = cli
        .json(&["version", "upload", "ok.wasm", "--tenant", "acme", "--handler", "orders"])
        .await;
    assert_eq!(keys(&version, &["handler", "state"]), json!(["orders", "ready"]));
    assert!(
        version["digest"].as_str().unwrap().starts_with(&ok)
            && version["report"]["imports"].is_array(),
        "{version}"
    );
    let shown = cli.ok(&["version", "show", &ok, "--tenant", "acme", "--handler", "orders"]).await;
    for part in ["handler      orders\n", "state        ready\n", "imports      ", "memory       "]
    {
        assert!(shown.contains(part), "{shown}");
    }

    let deployed =
        cli.json(&[&["deploy", "--version", &ok, "--handler", "orders"], of].concat()).await;
    assert_eq!(
        keys(&deployed, &["role", "event_type", "percent"]),
        json!(["stable", "order.placed", null])
    );
    let second = cli
        .json(
            &[
                &[
                    "deploy",
                    "new.wasm",
                    "--handler",
                    "orders",
                    "--set",
                    "a=b",
                    "--limit",
                    "deadline_ms=900",
                ],
                of,
            ]
            .concat(),
        )
        .await;
    assert_eq!(
        keys(&second, &["settings", "limits"]),
        json!([{ "a": "b" }, { "deadline_ms": 900 }])
    );
    let diff =
        cli.json(&["version", "diff", &ok, &new, "--tenant", "acme", "--handler", "orders"]).await;
    assert!(diff.is_object(), "{diff}");

    let back = cli.json(&[&["rollback", "--reason", "too slow"], of].concat()).await;
    assert!(back["live"]["digest"].as_str().unwrap().starts_with(&ok), "{back}");
    let history =
        cli.json(&["deployments", "--tenant", "acme", "--consumer", "orders", "--history"]).await;
    assert_eq!(
        keys(&history[1], &["ended_how", "ended_reason"]),
        json!(["rolled_back", "too slow"]),
        "{history}"
    );

    let canary = cli
        .json(
            &[
                &[
                    "canary",
                    "start",
                    "new.wasm",
                    "--handler",
                    "orders",
                    "--percent",
                    "10",
                    "--margin",
                    "7",
                ],
                of,
            ]
            .concat(),
        )
        .await;
    assert_eq!(keys(&canary, &["role", "percent"]), json!(["canary", 10.0]));
    assert_eq!(
        canary["guard"],
        json!({ "margin_percent": 7.0, "window_s": 60, "messages_min": 20 })
    );
    assert_eq!(
        cli.json(&[&["canary", "grow", "--percent", "50"], of].concat()).await["percent"],
        json!(50.0)
    );
    let listed = cli.json(&["canary", "list"]).await;
    assert_eq!(
        keys(&listed[0], &["role", "percent", "consumer"]),
        json!(["canary", 50.0, "orders"]),
        "{listed}"
    );
    let shown = cli.ok(&[&["canary", "show"], of].concat()).await;
    for part in [
        "of handler `orders`",
        "50 % of the ordering keys",
        "when it fails 7 points more often, over 60 s",
    ] {
        assert!(shown.contains(part), "{shown}");
    }
    let promoted = cli.json(&[&["canary", "promote"], of].concat()).await;
    assert!(
        promoted["role"] == "stable" && promoted["digest"].as_str().unwrap().starts_with(&new),
        "{promoted}"
    );
    let said = cli.run(&[&["canary", "stop"], of].concat()).await;
    assert_eq!(
        said.stderr,
        "error: no canary runs for `order.placed` of `acme/orders`; `oncebox deployments \
            --history` shows what became of it\n"
    );

    // What has ended is shown, and no longer listed.
    assert_eq!(cli.json(&["canary", "list"]).await, json!([]));
    assert_eq!(cli.json(&["canary", "list", "--history"]).await.as_array().map(Vec::len), Some(1));
    assert!(cli.ok(&[&["canary", "show"], of].concat()).await.contains("promoted"));
    cli.json(&[&["shadow", "start", "--version", &ok, "--handler", "orders"], of].concat()).await;
    assert_eq!(
        keys(&cli.json(&["shadow", "list"]).await[0], &["role", "consumer"]),
        json!(["shadow", "orders"])
    );
    assert_eq!(cli.json(&[&["shadow", "stop"], of].concat()).await["ended_how"], json!("ended"));

    // A name that nobody used before is told, beside that which is live.
    let said = cli.run(&[&["deploy", "new.wasm", "--handler", "order"], of].concat()).await;
    let note = "note: handler `order` is new; `orders` is live for `order.placed` of \
        `acme/orders`; `--handler orders` makes it a version of that\n";
    assert!(said.code == Some(0) && said.stderr.ends_with(note), "{}", said.stderr);
    let said = cli.run(&[&["deploy", "new.wasm", "--handler", "orders"], of].concat()).await;
    assert!(said.code == Some(0) && !said.stderr.contains("note:"), "{}", said.stderr);

    let audit = cli.json(&["audit", "--tenant", "acme", "--limit", "100"]).await;
    let actions: Vec<_> =
        audit.as_array().unwrap().iter().map(|entry| entry["action"].as_str().unwrap()).collect();
    for action in [
        "tenant.create",
        "consumer.create",
        "version.upload",
        "deploy",
        "rollback",
        "canary.promote",
    ] {
        assert!(actions.contains(&action), "{action}: {actions:?}");
    }
    assert!(
        cli.json(&["hosts"]).await.is_array() && cli.json(&["inbox", "list"]).await == json!([])
    );

    let storage = cli.json(&["storage"]).await;
    let of_tenant = cli.json(&["storage", "--tenant", "acme"]).await;
    assert_eq!(
        keys(&of_tenant, &["tenant", "messages", "bytes", "budget_bytes"]),
        json!(["acme", 0, 0, null])
    );
    assert_eq!(of_tenant["consumers"], storage["tenants"][0]["consumers"], "{storage}");
    assert_eq!(
        keys(&of_tenant["consumers"][0], &["consumer", "class", "levels_off_at_bytes"]),
        json!(["orders", "7d", 0])
    );
    let shown = cli.ok(&["storage"]).await;
    for part in ["acme/orders  0 ", "LEVELS OFF AT", "CLASS  PARTITIONS  SIZE\n7d "] {
        assert!(shown.contains(part), "{shown}");
    }
}

/// Members of an object; one that differs from run to run is a star.
fn keys(value: &Value, keys: &[&str]) -> Value {
    keys.iter()
        .map(|key| if *key == "schema_name" { json!("*") } else { value[*key].clone() })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_on_the_database() {
    check_shapes(Access::Database).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_command_over_a_server() {
    check_shapes(Access::Server).await;
}
