//! The commands of endpoints, on the database and through the API of a server. What could go wrong:
//! a secret is in what a command prints, in the audit log or in a host's log, or is sent in another
//! form than its file has it.

use oncebox_control::generate_signing_secret;
use oncebox_tests::{
    cli::{Access, CliFixture},
    provider::{Behaviour, Provider},
};

/// End of the URL, which is a secret.
const PATH: &str = "s3cr3t-path";
/// Value of a header.
const TOKEN: &str = "Bearer s3cr3t-token";
const SERVER_LOG: &str = "server.log";

/// A tenant that may send to a provider, with files that hold secrets.
struct EndpointFixture {
    cli: CliFixture,
    provider: Provider,
    /// What nothing may show.
    secrets: Vec<String>,
}

impl EndpointFixture {
    async fn new(access: Access) -> Self {
        let provider = Provider::start(Behaviour::sound()).await;
        let mut cli = CliFixture::open(Access::Database).await;
        cli.file("host.toml", provider.host_settings());
        let config = cli.dir().join("host.toml").display().to_string();
        if access == Access::Server {
            cli.start_server(&[("ONCEBOX_CONFIG", &config)]).await.expect("a server");
            let token = cli.json(&["token", "create", "tester", "--role", "admin"]).await;
            let (url, token) = (cli.server_url(), token["token"].as_str().unwrap().to_owned());
            cli.folder().unset("ONCEBOX_DATABASE_URL");
            cli.folder().unset("ONCEBOX_MASTER_KEY");
            cli.folder().set("ONCEBOX_SERVER", &url);
            cli.folder().set("ONCEBOX_TOKEN", &token);
        } else {
            cli.folder().set("ONCEBOX_CONFIG", &config);
        }
        let (first, second) = (generate_signing_secret(), generate_signing_secret());
        cli.file("url", format!("{}/{PATH}\n", provider.url()));
        cli.file("token", format!("{TOKEN}\n"));
        cli.file("first", format!("{first}\n"));
        cli.file("second", format!("{second}\n"));
        cli.file("weak", "whsec_weak-s3cr3t");
        cli.ok(&["tenant", "create", "acme"]).await;
        let host = provider.authority();
        cli.ok(&["tenant", "limits", "acme", "--endpoint-hosts-allowed", &host]).await;
        let secrets = vec!["s3cr3t".to_owned(), first, second];
        Self { cli, provider, secrets }
    }

    /// Runs a command that succeeds, and checks that it shows a text and no secret.
    async fn shows(&self, arguments: &[&str], text: &str) {
        let said = self.cli.run(arguments).await;
        let all = format!("{}{}", said.stdout, said.stderr);
        assert_eq!(said.code, Some(0), "{arguments:?}: {all}");
        assert!(all.contains(text), "{arguments:?}: {all}");
        self.hides(&all, arguments);
    }

    /// Runs a command that fails, and checks that it says why and shows no secret.
    async fn refuses(&self, arguments: &[&str], text: &str) {
        let said = self.cli.run(arguments).await;
        assert_eq!((said.code, said.stdout.as_str()), (Some(1), ""), "{arguments:?}");
        assert!(said.stderr.contains(text), "{arguments:?}: {}", said.stderr);
        self.hides(&said.stderr, arguments);
    }

    fn hides(&self, all: &str, what: &[&str]) {
        for secret in &self.secrets {
            assert!(!all.contains(secret.as_str()), "{what:?} shows `{secret}`: {all}");
        }
    }
}

/// The command for an endpoint of the tenant, with further arguments.
fn command<'a>(verb: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["endpoint", verb, "pay", "--tenant", "acme"][..], more].concat()
}

/// The command that sets the endpoint, with secrets from files.
fn set<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let secret_header = ["--secret-header", "authorization=token"];
    let of_files = ["--url-file", "url", "--signing-secret-file", "first"];
    let others = ["--header", "x-team=orders", "--receiver-deduplicates"];
    command("set", &[&secret_header[..], &of_files, &others, more].concat())
}

async fn check(access: Access) {
    let mut fixture = EndpointFixture::new(access).await;
    let at = format!("endpoint `pay` at http://{}", fixture.provider.authority());
    let by_url = |url: &'static str| command("set", &["--url", url, "--receiver-deduplicates"]);

    // Errors name what is wrong.
    let undecided = command("set", &["--url-file", "url"]);
    fixture.refuses(&undecided, "`--duplicates-accepted-by` and `--because`").await;
    let missing = command("set", &["--url-file", "nowhere", "--receiver-deduplicates"]);
    fixture.refuses(&missing, "failed to read a secret from `nowhere`: No such file").await;
    let weak = command(
        "set",
        &["--url-file", "url", "--signing-secret-file", "weak", "--receiver-deduplicates"],
    );
    fixture.refuses(&weak, "a signing secret is `whsec_` and 24 to 64 bytes in base64").await;
    let twice = set(&["--header", "authorization=x"]);
    fixture.refuses(&twice, "header `authorization` is there twice").await;
    let elsewhere = by_url("https://evil.example/s3cr3t");
    fixture.refuses(&elsewhere, "`evil.example` is not among the hosts").await;
    let user = by_url("https://me:s3cr3t@evil.example/");
    fixture.refuses(&user, "must hold no user or password").await;
    fixture.refuses(&command("show", &[]), "tenant `acme` has no endpoint `pay`").await;

    // What is set is shown without its secrets.
    fixture.shows(&set(&["--dry-run"]), &format!("would have the {at}")).await;
    fixture.refuses(&command("show", &[]), "tenant `acme` has no endpoint `pay`").await;
    fixture.shows(&set(&[]), &format!("tenant `acme` has the {at}")).await;
    fixture.shows(&set(&[]), "the endpoint `pay` of tenant `acme` is as it was").await;
    fixture.shows(&set(&["--pause-ms", "100"]), "has other settings: pause_ms").await;
    fixture.shows(&set(&["--pause-ms", "100", "--json"]), "\"is_new\": false").await;
    // That it may act twice is a choice, and its price is named.
    let accepts = ["--url-file", "url", "--duplicates-accepted-by", "ops", "--because", "rare"];
    let warning = "warning: endpoint `pay` may act twice on a message, which ops accepts: rare";
    let said = fixture.cli.ok(&command("set", &[&accepts[..], &["--dry-run"]].concat())).await;
    // S2-005.
    assert!(said.contains(warning), "{said}");
    let list = ["endpoint", "list", "--tenant", "acme"];
    fixture.shows(&list, "recognised").await;
    fixture.shows(&[&list[..], &["--json"]].concat(), "\"header_names\": [").await;
    fixture.shows(&command("show", &[]), "x-team").await;
    fixture.shows(&command("show", &["--json"]), "\"signing_secrets\": 1").await;

    // The provider gets them as they are in their files, without the line break.
    fixture.shows(&command("test", &[]), "answered 200").await;
    let calls = fixture.provider.calls();
    let header = |name: &str| calls[0].headers.get(name).map_or("", String::as_str);
    assert_eq!(calls[0].line, format!("POST /charges/{PATH}"));
    assert_eq!((header("authorization"), header("x-team")), (TOKEN, "orders"));
    assert_eq!(header("webhook-signature").split(' ').count(), 1);

    // A rotation: both secrets sign. One that the host makes is printed once.
    let second = command("rotate", &["--signing-secret-file", "second"]);
    fixture.shows(&second, "are signed with 2 secrets").await;
    fixture.refuses(&second, "has two signing secrets").await;
    fixture.shows(&command("test", &["--json"]), "\"verdict\": \"delivered\"").await;
    let calls = fixture.provider.calls();
    assert_eq!(calls[1].headers["webhook-signature"].split(' ').count(), 2);
    fixture.shows(&command("rotate", &["--finish"]), "are signed with one secret").await;
    fixture.refuses(&command("rotate", &["--finish"]), "no rotation").await;
    let made = fixture.cli.ok(&command("rotate", &[])).await;
    assert!(made.starts_with("whsec_") && made.lines().count() == 1, "{made}");
    fixture.secrets.push(made.trim().to_owned());
    fixture.shows(&command("show", &["--json"]), "\"signing_secrets\": 2").await;
    fixture.shows(&command("remove", &[]), "has no endpoint `pay` any more").await;
    fixture.refuses(&command("remove", &[]), "tenant `acme` has no endpoint `pay`").await;

    let audit = fixture.cli.rows("SELECT to_jsonb(a::text) FROM oncebox.audit a").await;
    let audit = serde_json::to_string(&audit).unwrap();
    assert!(audit.contains("endpoint.set") && audit.contains("endpoint.remove"), "{audit}");
    fixture.hides(&audit, &["the audit log"]);
    if access == Access::Server {
        let log = std::fs::read_to_string(fixture.cli.dir().join(SERVER_LOG)).unwrap();
        fixture.hides(&log, &["the server's log"]);
    }
    assert_eq!(fixture.provider.faults(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_of_an_endpoint_are_in_no_output_on_the_database() {
    check(Access::Database).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_of_an_endpoint_are_in_no_output_over_a_server() {
    check(Access::Server).await;
}
