//! The page of a message whose policy masks parts of it. What could go wrong: a page shows them to
//! whoever opens it, or to a form of another site; an editor stores what it was filled with.

use axum::http::StatusCode;
use oncebox_api::{Limits, Mode, wire::Role};

use super::{Console, shell_words};
use crate::admin_api::{
    fixture::ApiFixture,
    masking::{SECRET, mask},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_what_is_masked_once_and_for_a_reason() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    mask(&fixture, "admin").await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("acme", Role::Admin)).await;
    let operator = console.sign_in(&fixture.token_of("acme", Role::Operator)).await;
    let page = "/console/tenants/acme/consumers/orders/messages/m%2F1";
    let (record, edit) = (format!("{page}?payload=true"), format!("{page}/edit"));
    let sent = "/console/tenants/acme/outgoing/o-1?payload=true";
    let why = [("because", "the card was refused")];
    let before = fixture.digest().await;
    for visitor in [&admin, &operator] {
        for path in [page, &record, &edit, sent] {
            let shown = visitor.get(path).await;
            assert_eq!(shown.status, StatusCode::OK, "{path}: {}", shown.body);
            assert!(!shown.body.contains(SECRET), "{path}: {}", shown.body);
        }
        let empty = visitor.get(&edit).await.body;
        assert!(empty.contains("spellcheck=\"false\">\n</textarea>"), "{empty}");
        assert!(empty.contains("not filled in"), "{empty}");
    }
    let offered = admin.get(&record).await;
    assert!(offered.body.contains("<button>Show unmasked</button>"), "{}", offered.body);
    for command in offered.commands() {
        let words = shell_words(&command);
        oncebox_cli::check_command(words[1..].iter().map(String::as_str)).unwrap();
    }
    let kept = operator.get(&record).await.body;
    assert!(!kept.contains("<button>Show unmasked"), "{kept}");
    assert!(kept.contains("needs the role admin"), "{kept}");

    let mut refused = admin.forged(page, &why, Some(&operator)).await;
    refused.push(("too small a role", operator.post(page, &why).await));
    for (kind, answer) in refused {
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{kind}: {answer:?}");
        assert!(!answer.body.contains(SECRET), "{kind}: {answer:?}");
    }
    assert_eq!(admin.post(page, &[]).await.status, StatusCode::BAD_REQUEST);
    let names = [("tenant", "acme"), ("consumer", "orders"), ("id", "m/1")];
    // `***`, as a page shows a payload that cannot be looked into.
    let copied = [&names[..], &why, &[("payload_base64", "Kioq")]].concat();
    assert_eq!(admin.act("message-edit", &copied).await.status, StatusCode::BAD_REQUEST);
    assert_eq!(fixture.digest().await, before, "what is refused leaves no trace");

    let shown = admin.post(page, &why).await;
    assert_eq!(shown.status, StatusCode::OK, "{shown:?}");
    assert!(shown.body.contains(SECRET), "{}", shown.body);
    shown.check_headers(page);
    let (_, editor) = shown.body.split_once("<textarea").expect("an editor");
    assert!(editor.split("</textarea>").next().unwrap().contains(SECRET), "{editor}");
    assert_ne!(fixture.digest().await, before, "the audit log has it");
    assert!(!admin.get(&record).await.body.contains(SECRET), "it was shown once");

    // A payload that the visitor wrote leads to an edit, beside the masked one.
    let written = admin.post(&edit, &[("payload", "{}"), ("because", "a typo")]).await;
    assert!(written.body.contains("Edit and run again"), "{}", written.body);
    assert!(!written.body.contains(SECRET), "{}", written.body);
    fixture.finish().await;
}
