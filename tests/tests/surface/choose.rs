//! `oncebox choose` without a terminal. What could go wrong: a question that no option answers
//! hangs or is guessed, an answer that changes nothing is swallowed, or the policy that it prints
//! is refused by the command that reads it.

use oncebox_tests::program::WorkingDir;
use serde_json::json;

/// Answers that end, with the pattern.
const ENDS: [(&[&str], &str); 4] = [
    (&["--effect", "tolerant", "--id", "header"], "tolerant"),
    (&["--effect", "value", "--order", "any", "--id", "header", "--replay", "yes"], "idempotent"),
    (
        &[
            "--effect",
            "amount",
            "--order",
            "version",
            "--id",
            "payload",
            "--two-ids",
            "yes",
            "--replay",
            "yes",
        ],
        "sequence",
    ),
    (
        &[
            "--effect",
            "call",
            "--other-side",
            "key",
            "--order",
            "any",
            "--id",
            "cloudevents",
            "--two-ids",
            "no",
            "--replay",
            "no",
        ],
        "outbox",
    ),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_effect_leads_to_a_policy_that_can_be_used() {
    let folder = WorkingDir::new().unwrap();
    let choose = async |answers: &[&str]| {
        folder.run(&[&["choose"], answers].concat(), "1\n1\n1\n").await.unwrap()
    };
    for (answers, pattern) in ENDS {
        let chosen = choose([answers, &["--json"]].concat().as_slice()).await.json().unwrap();
        assert_eq!(chosen["pattern"], pattern, "{chosen:#}");
        let required = chosen["gate"]["require"].as_array().unwrap().clone();
        let is_whole = chosen["gate"]["cannot_meet"].as_array().unwrap().is_empty();
        assert_eq!(is_whole, required.len() == 7, "{chosen:#}");
        let keeps_rows = ["sequence", "outbox"].contains(&pattern);
        assert_eq!(required.contains(&json!("durable_dedup")), keeps_rows, "{chosen:#}");
        folder.write("policy.toml", chosen["policy"].as_str().unwrap()).unwrap();
        let said = folder.run(&["policy", "check", "policy.toml"], "").await.unwrap();
        // S1-127.
        assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""), "{}", said.stdout);
        let said = choose(answers).await;
        let gate = "the gate: oncebox consumer readiness CONSUMER --tenant TENANT";
        let gate = said.stdout.lines().find(|line| line.starts_with(gate)).unwrap();
        assert_eq!(gate.ends_with("--tenant TENANT"), is_whole, "{gate}");
        let again = format!("oncebox choose {}", answers.join(" "));
        assert_eq!((said.code, said.stderr.as_str()), (Some(0), ""), "{}", said.stdout);
        assert_eq!(
            said.stdout.lines().last(),
            Some(&*format!("the same without questions: {again}"))
        );
    }
    for (answers, line) in [
        (
            &["--effect", "call"][..],
            "`--other-side` is needed where no terminal can be asked: `key`, `lookup`, `neither`",
        ),
        (
            &["--effect", "tolerant", "--id", "header", "--replay", "yes"],
            "`--replay` changes nothing after the other answers; leave it out",
        ),
    ] {
        let said = choose(answers).await;
        let expected = (Some(1), format!("error: {line}\n"), "");
        assert_eq!((said.code, said.stderr, said.stdout.as_str()), expected, "{answers:?}");
    }
    let said = choose(&["--effect", "payment"]).await;
    assert!(said.code == Some(2) && said.stderr.contains("possible values"), "{said:?}");
}
