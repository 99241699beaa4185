//! Tenants and outgoing messages: what is to be sent is the host's, and each tenant's alone.

use oncebox_tests::{
    inbox::{Guest, InboxFixture, code, deliver},
    outgoing::{CancelTransaction, emitting, emitting_host, outgoing},
};

/// What could go wrong: a handler writes what is sent, or who gets it, past the host's checks;
/// reads what others send; or withdraws messages of another consumer or tenant. S0-047.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_session_reaches_no_outgoing_message() {
    let fixture = InboxFixture::new().await;
    let (acme, globex) = (fixture.tenant("acme", "").await, fixture.tenant("globex", "").await);
    let orders = fixture.consumer(&acme, "orders", "").await;
    let beside = fixture.consumer(&acme, "beside", "").await;
    let theirs = fixture.consumer(&globex, "orders", "").await;
    for consumer in [&orders, &beside, &theirs] {
        let log = [emitting(0, "a", &["emit kafka:orders.out token=t"])];
        deliver(&emitting_host(&fixture, consumer), &log).await;
    }
    let before = outgoing(&fixture).await;
    assert_eq!(before.len(), 3);
    let partition = &before[0].partition;
    let refused = [
        "SELECT * FROM oncebox.outgoing".to_owned(),
        "SELECT count(*) FROM oncebox.outgoing".to_owned(),
        "SELECT 1 FROM oncebox.outgoing FOR UPDATE".to_owned(),
        "UPDATE oncebox.outgoing SET destination = 'kafka:other'".to_owned(),
        "DELETE FROM oncebox.outgoing".to_owned(),
        "TRUNCATE oncebox.outgoing".to_owned(),
        "INSERT INTO oncebox.outgoing SELECT * FROM oncebox.outgoing".to_owned(),
        "LOCK TABLE oncebox.outgoing".to_owned(),
        format!("SELECT * FROM {partition}"),
        format!("DELETE FROM {partition}"),
    ];
    for sql in refused {
        let mut guest = Guest::begin(&fixture, &orders).await;
        let error = guest.execute(&sql).await.expect_err(&sql);
        // S0-047.
        assert_eq!(code(&error), "42501", "`{sql}`: {error}");
    }
    let secrets = [Vec::new(), vec![0; 32], fixture.secret(&globex), fixture.secret(&acme)];
    for (secret, consumer) in secrets.into_iter().zip([&orders, &orders, &orders, &theirs]) {
        let mut stranger = CancelTransaction::begin(&fixture, &orders).await;
        stranger.secret = secret;
        stranger.consumer_id = consumer.row.consumer_id;
        let error = stranger.cancel("t").await.expect_err("a stranger cancels");
        assert_eq!(code(&error), "42501", "{error}");
    }
    assert_eq!(outgoing(&fixture).await, before);

    // A token is of its consumer.
    let mut own = CancelTransaction::begin(&fixture, &orders).await;
    assert!(own.cancel("t").await.unwrap());
    own.commit().await;
    let rows = outgoing(&fixture).await;
    let states: Vec<_> = rows.iter().map(|row| row.status.as_str()).collect();
    assert_eq!(states, ["cancelled", "received", "received"]);
    fixture.finish().await;
}

/// What could go wrong: a completion writes outgoing messages although its transaction claimed
/// nothing, so that what is sent has no cause.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_emitted_without_a_claim() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let mut guest = Guest::begin(&fixture, &consumer).await;
    let error = guest.complete(&[], &[]).await.expect_err("a completion without a claim");
    assert_eq!(code(&error), "OB002");
    drop(guest);
    assert!(outgoing(&fixture).await.is_empty());
    fixture.finish().await;
}
