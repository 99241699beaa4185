//! The database's own position of a partition: a host goes back to it where another server answers
//! than the one that confirmed what was acked.

use oncebox_inbox::PartitionReceiver;
use oncebox_model::inbox::{Behind, Inbox, OpenAt, Opened, ServerRun};
use oncebox_tests::inbox::{InboxFixture, drive, open, records};

const POSITION: &str = "SELECT next_offset FROM oncebox.partition_position";

/// An offset of the first partition that was acked under a server.
fn at(next_offset: i64, topic_id: Option<&str>, server: &ServerRun) -> OpenAt {
    let (topic, topic_id) = ("t".into(), topic_id.map(Into::into));
    OpenAt { topic, topic_id, partition: 0, next_offset, server: server.clone() }
}

/// Opens a partition and gives it up. Returns the server of an open one, or the position.
async fn opened(inbox: &PartitionReceiver, at: OpenAt) -> Result<ServerRun, Behind> {
    match inbox.open(at).await.unwrap() {
        Opened::Behind(behind) => Err(behind),
        Opened::Ready(partition) => {
            let server = partition.server();
            partition.close(0).await;
            Ok(server)
        }
    }
}

/// What could go wrong: an offset that another server confirmed counts although this one is behind,
/// or one that is valid is gone back from; or the check itself takes the partition. S1-105.
#[tokio::test(flavor = "multi_thread")]
async fn a_partition_opens_where_the_database_stands() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    let mut partition = open(&host, 0).await;
    assert!(drive(&mut partition, &records(["a", "b", "c", "d"])).await.is_empty());
    assert_eq!(fixture.number(POSITION).await, 0, "noted when it was opened");
    partition.close().await;
    assert_eq!(fixture.number(POSITION).await, 4, "noted when it was given up");

    let inbox = PartitionReceiver(host);
    let server = opened(&inbox, at(4, None, &None)).await.unwrap();
    let other: ServerRun = Some("another".into());
    assert!(server.is_some() && server != other);
    // The same server, or nobody's word: the offset counts, and is noted.
    assert_eq!(opened(&inbox, at(9, None, &server)).await, Ok(server.clone()));
    assert_eq!(opened(&inbox, at(6, Some("its id"), &None)).await, Ok(server.clone()));
    assert_eq!(fixture.number(POSITION).await, 6);
    // Another server, which the present one may be behind.
    let behind = |next_offset| Behind { next_offset, server: server.clone() };
    for (topic_id, known) in [(None, 6), (Some("its id"), 6), (Some("of another topic"), 0)] {
        let asked = inbox.behind(at(7, topic_id, &other)).await.unwrap();
        assert_eq!(asked, Some(behind(known)), "{topic_id:?}");
        assert_eq!(opened(&inbox, at(7, topic_id, &other)).await, Err(behind(known)));
    }
    assert_eq!(inbox.behind(at(7, None, &server)).await.unwrap(), None);
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.probation").await, 0);
    // It is not.
    assert_eq!(inbox.behind(at(6, None, &other)).await.unwrap(), None);
    assert_eq!(opened(&inbox, at(6, None, &other)).await, Ok(server.clone()));
    // What it has lost of the position is everything.
    fixture.execute("DELETE FROM oncebox.partition_position".to_owned()).await;
    assert_eq!(opened(&inbox, at(6, None, &other)).await, Err(behind(0)));
    fixture.finish().await;
}

/// What could go wrong: a host that has lost a partition gives it up late and sets its position back,
/// so that the next start of the server looks like a loss.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_host_sets_no_position_back() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let messages = records(["a", "b", "c", "d"]);
    let mut late = open(&fixture.host(&consumer), 0).await;
    assert!(drive(&mut late, &messages[..2]).await.is_empty());
    let mut present = open(&fixture.host(&consumer), 2).await;
    assert!(drive(&mut present, &messages[2..]).await.is_empty());
    present.close().await;
    assert_eq!(fixture.number(POSITION).await, 4);
    late.close().await;
    assert_eq!(fixture.number(POSITION).await, 4);
    fixture.finish().await;
}

/// What could go wrong: without deduplication, records that had their effect are read again.
#[tokio::test(flavor = "multi_thread")]
async fn without_deduplication_nothing_is_read_again() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "dedup = 'off'").await;
    let inbox = PartitionReceiver(fixture.host(&consumer));
    let other: ServerRun = Some("another".into());
    assert_eq!(opened(&inbox, at(7, None, &other)).await, Ok(None));
    assert_eq!(inbox.behind(at(7, None, &other)).await.unwrap(), None);
    fixture.finish().await;
}
