//! Would the tests notice? Each named defect is switched on, in the host or in a database of its
//! own, and its scenario has to turn red; the same scenario is green without it.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Result;
use chrono::{DateTime, Utc};
use futures::{FutureExt, future::LocalBoxFuture};
use oncebox_control::{
    Action, ArchiveOptions, ArchiveStore, DeploymentRole, Edit, ErasureRequest, ErasureTarget,
    FetchLimits, JobFilter, NewDeployment, NewEndpoint, NewJob, NewTenantStore, ReplayFilter,
    ReplayStart, Stores,
};
use oncebox_inbox::{
    Admission, AdmissionRequest, Budget, Class, HostBounds, Scheduler, SessionSettings, Sessions,
    retry::{self, poller::release_unblocked},
};
use oncebox_model::{
    InboxError, Output, Shadow,
    hooks::{self, switch_sabotage},
    message::Message,
    outcome::{Failure, FailureKind},
    outgoing::AnswerMode,
    policy::Limits,
    record::Record,
};
use oncebox_tests::{
    aging::age,
    cluster::{Cluster, Successor},
    collisions::{
        DEADLOCK, HELD_UP, MISTAKEN, PATIENT, crossed, hold, keys, neighbours, strangers,
    },
    host::{HostFixture, Options, aside},
    inbox::{
        Guest, InboxFixture, PlainHandler, PlainHandlers, Script, TestConsumer, deliver, drive,
        execute, open, record, records, step,
    },
    interpreter::{interpreter, record_of},
    job::{carry_out, inbox_job, these, work_off},
    load::{Load, Work},
    lookup3::Forger,
    outgoing::{
        CancelTransaction, StepRelay, age_outgoing, caused_by, check_emitted, emitting,
        emitting_host,
    },
    provider::{Behaviour, Provider, Reply},
    proxy::Proxy,
    relay::TestRelay,
    replay::{self, PROJECTION, reset},
    s3::{ACCESS_KEY_ID, BUCKET, S3Server, SECRET_ACCESS_KEY},
    temp_dir::TempDir,
    wait::DEADLINE,
};
use serde::{Deserialize, Serialize};
use sqlx::{AssertSqlSafe, Connection, Executor};
use tokio::{
    io::AsyncWriteExt,
    net::TcpSocket,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

/// A defect: its name, how it is made, who has to notice it, and a part of what they say.
struct Defect {
    name: &'static str,
    made: Made,
    scenario: &'static str,
    sees: &'static str,
}

/// How a defect is made.
enum Made {
    /// A switch in the code of the host, of the same name.
    Switch,
    /// Changes of the database's functions: name, text, other text.
    Functions(&'static [(&'static str, &'static str, &'static str)]),
    /// Both.
    SwitchAndFunctions(&'static [(&'static str, &'static str, &'static str)]),
    /// Statements of a superuser.
    Statements(&'static str),
}

const TWICE: &str = "a message has two rows";
const ODD: &str = "a completed message has one effect, any other none";
const LOST: &str = "lost";
const PASSED: &str = "a message passed one of its key that was not done";
const FORGOTTEN: &str = "a message waits for nothing";
const HOST_HELD_UP: &str = "the host is held up by a tenant's locks";
const REFUSED: &str = "a kept place is refused";
const UNUSABLE: &str = "hosts of the release before cannot work on these tables";
const EMITTED_OTHERS: &str = "outgoing messages are not those of the completed messages";
const MISCOUNTED: &str = "a job counts other messages than it changed";
const NOT_WHAT_CAME: &str = "a redriven message is not what came";

static DEFECTS: &[Defect] = &[
    // The claim
    Defect {
        name: "no_message_lock",
        scenario: "two claims over a bucket's end",
        sees: TWICE,
        made: Made::Functions(&[(
            "claim",
            "PERFORM pg_advisory_xact_lock(p_consumer, l.key)",
            "PERFORM l.key",
        )]),
    },
    Defect {
        name: "look_in_own_bucket_only",
        scenario: "a duplicate in a later bucket",
        sees: TWICE,
        made: Made::Functions(&[(
            "claim",
            "i.message_id = u.id",
            "i.message_id = u.id AND i.bucket = v.bucket",
        )]),
    },
    Defect {
        name: "isolation_unchecked",
        scenario: "a claim under an old snapshot",
        sees: TWICE,
        made: Made::Functions(&[(
            "claim",
            "current_setting('transaction_isolation') <> 'read committed'",
            "false",
        )]),
    },
    Defect {
        name: "stale_deployments_claim",
        scenario: "a stale host",
        sees: "a withdrawn version completed a message",
        made: Made::Functions(&[("claim", "p_generation < v.generation_required", "false")]),
    },
    Defect {
        name: "secret_unchecked",
        scenario: "a guest that claims",
        sees: "a guest spoke as the host",
        made: Made::Functions(&[("authorize", "t.secret_hash = sha256(p_secret)", "true")]),
    },
    Defect {
        name: "locks_of_all_consumers_together",
        scenario: "ids made for another tenant's locks",
        sees: HELD_UP,
        made: Made::Functions(&[(
            "claim",
            "pg_advisory_xact_lock(p_consumer, l.key)",
            "pg_advisory_xact_lock(0, l.key)",
        )]),
    },
    Defect {
        name: "keys_of_all_consumers_together",
        scenario: "keys that meet another tenant's",
        sees: HELD_UP,
        made: Made::Functions(&[(
            "claim",
            "pg_try_advisory_xact_lock(-p_consumer, ",
            "pg_try_advisory_xact_lock(0, ",
        )]),
    },
    Defect {
        name: "one_lock_is_one_message",
        scenario: "messages that share a lock",
        sees: MISTAKEN,
        made: Made::Functions(&[(
            "claim",
            "PARTITION BY u.id COLLATE \"C\"",
            "PARTITION BY hashtextextended(u.id, p_consumer::bigint) >> 32",
        )]),
    },
    Defect {
        name: "locks_in_the_order_of_ids",
        scenario: "ids whose locks cross",
        sees: DEADLOCK,
        made: Made::Functions(&[
            (
                "claim",
                "SELECT DISTINCT (hashtextextended(u.id, p_consumer::bigint)",
                "SELECT (hashtextextended(u.id, p_consumer::bigint)",
            ),
            (
                "claim",
                "FROM unnest(p_id) AS u(id) ORDER BY 1)",
                "FROM unnest(p_id) AS u(id) ORDER BY u.id COLLATE \"C\")",
            ),
        ]),
    },
    Defect {
        name: "host_locks_among_messages",
        scenario: "ids made for the host's locks",
        sees: HOST_HELD_UP,
        made: Made::Switch,
    },
    Defect { name: "duplicates_run", scenario: "duplicates", sees: ODD, made: Made::Switch },
    // Completion and commit
    Defect {
        name: "guard_off",
        scenario: "a stray commit",
        sees: "a stray COMMIT kept an effect",
        made: Made::Statements("DROP TRIGGER guard ON oncebox.guard"),
    },
    Defect {
        name: "complete_without_guard",
        scenario: "a transaction lost its claim",
        sees: LOST,
        made: Made::Functions(&[(
            "complete",
            "RAISE EXCEPTION 'no claim in this transaction' USING ERRCODE = 'OB002'",
            "NULL",
        )]),
    },
    Defect {
        name: "what_fits_unlearned",
        scenario: "a slow batch",
        sees: "claims were written",
        made: Made::Switch,
    },
    Defect {
        name: "withdrawn_claims_stay",
        scenario: "a slow batch",
        sees: ODD,
        made: Made::Switch,
    },
    Defect {
        name: "lost_commit_is_done",
        scenario: "a lost answer to COMMIT",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "completion_unread",
        scenario: "a result that cannot be stored",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "completion_error_is_commits",
        scenario: "a result that cannot be stored",
        sees: "the failure is not that of the completion",
        made: Made::Switch,
    },
    Defect {
        name: "ahead_unread",
        scenario: "statements that nobody waits for",
        sees: "a message ends otherwise than its statements say",
        made: Made::Switch,
    },
    Defect {
        name: "earlier_failure_is_own",
        scenario: "statements that nobody waits for",
        sees: "a message ends otherwise than its statements say",
        made: Made::Switch,
    },
    Defect {
        name: "rows_unexpected",
        scenario: "statements that nobody waits for",
        sees: "a message ends otherwise than its statements say",
        made: Made::Switch,
    },
    Defect {
        name: "ack_before_commit",
        scenario: "killed at work",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "offset_stored_before_settled",
        scenario: "killed at work",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "revoke_without_waiting",
        scenario: "hand-over",
        sees: "two hosts are at one message",
        made: Made::Switch,
    },
    Defect {
        name: "topic_id_ignored",
        scenario: "a topic made again",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "topic_id_not_noted",
        scenario: "a topic made again",
        sees: LOST,
        made: Made::Switch,
    },
    // A migration that breaks hosts of the release before, and not those of this one
    Defect {
        name: "migration_requires_a_column",
        scenario: "a host of the release before",
        sees: UNUSABLE,
        made: Made::Statements("ALTER TABLE oncebox.host ALTER COLUMN version SET NOT NULL"),
    },
    Defect {
        name: "migration_requires_a_reader",
        scenario: "a host of the release before",
        sees: UNUSABLE,
        made: Made::Statements(
            "CREATE FUNCTION public.ask() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
                IF NOT EXISTS (SELECT FROM oncebox.host WHERE version IS NOT NULL) THEN \
                RAISE EXCEPTION 'no host of this release runs'; END IF; RETURN NEW; END $$; \
            ALTER FUNCTION public.ask() SECURITY DEFINER; \
            CREATE TRIGGER ask BEFORE INSERT ON oncebox.inbox FOR EACH ROW EXECUTE FUNCTION \
                public.ask()",
        ),
    },
    Defect {
        name: "server_unchecked",
        scenario: "a failover that loses commits",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "position_noted_ahead",
        scenario: "a position that is noted",
        sees: LOST,
        made: Made::Functions(&[(
            "claim",
            "SET next_offset = p_position",
            "SET next_offset = p_position + 1000",
        )]),
    },
    Defect {
        name: "cut_off_stays",
        scenario: "a host that is cut off",
        sees: "it keeps its partitions",
        made: Made::Switch,
    },
    Defect {
        name: "mark_after_start",
        scenario: "a start that ends the host",
        sees: "it ended two hosts",
        made: Made::Switch,
    },
    Defect { name: "shadow_commits", scenario: "a shadow", sees: ODD, made: Made::Switch },
    // Failures
    Defect {
        name: "swallowed_error_is_ok",
        scenario: "a swallowed error",
        sees: "nothing is settled",
        made: Made::Switch,
    },
    Defect {
        name: "failed_effect_stays",
        scenario: "a failure in a batch",
        sees: ODD,
        made: Made::Switch,
    },
    Defect {
        name: "batch_answers_ignored",
        scenario: "a failed answer in a batch",
        sees: "a rejected message completed",
        made: Made::Switch,
    },
    Defect {
        name: "light_rows_stay_light",
        scenario: "a light message that fails",
        sees: "a light message lost its record",
        made: Made::Functions(&[(
            "complete",
            "p_headers, p_payload, p_record)",
            "p_headers, p_payload, NULL::jsonb[])",
        )]),
    },
    Defect {
        name: "undecodable_dropped",
        scenario: "an undecodable record",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "horizon_by_host_clock",
        scenario: "a young message",
        sees: "was taken for a forgotten one",
        made: Made::Switch,
    },
    Defect { name: "collisions_dropped", scenario: "a collision", sees: LOST, made: Made::Switch },
    Defect {
        name: "attempt_on_host_fault",
        scenario: "a fault of the host",
        sees: "cost the message an attempt",
        made: Made::Switch,
    },
    Defect {
        name: "failure_written_by_upsert",
        scenario: "a zombie that fails",
        sees: ODD,
        made: Made::SwitchAndFunctions(&[(
            "complete",
            "i.xmin = pg_current_xact_id()::xid ELSE",
            "true ELSE",
        )]),
    },
    // Retries and leases
    Defect {
        name: "epoch_unchecked",
        scenario: "a lease that runs out",
        sees: ODD,
        made: Made::Functions(&[
            ("resume", "AND i.status = 'in_progress' AND i.epoch = p_epoch", ""),
            ("complete", " AND i.epoch = s.epoch", ""),
            ("complete", "i.status = 'in_progress' END", "true END"),
        ]),
    },
    Defect {
        name: "lease_without_row_lock",
        scenario: "a lease that runs out",
        sees: "a worker that lives",
        made: Made::Functions(&[("lease", " FOR UPDATE SKIP LOCKED", "")]),
    },
    Defect {
        name: "lease_uncounted",
        scenario: "retries",
        sees: "attempts",
        made: Made::Functions(&[("lease", "attempts = i.attempts + 1", "attempts = i.attempts")]),
    },
    Defect {
        name: "crashes_uncounted",
        scenario: "a message that kills its session",
        sees: "runs for ever",
        made: Made::Functions(&[(
            "lease",
            "crashes = i.crashes + (v_ended IS NOT DISTINCT FROM 'crashed')::int",
            "crashes = i.crashes",
        )]),
    },
    Defect {
        name: "outages_charged",
        scenario: "outages under a retry",
        sees: "outages parked a message",
        made: Made::Switch,
    },
    Defect {
        name: "restarts_charged",
        scenario: "a restart of the server under a lease",
        sees: "a restart of the server is counted as a crash",
        made: Made::Functions(&[(
            "lease",
            "v_ended IS NOT DISTINCT FROM 'crashed'",
            "v_ended IS NOT NULL",
        )]),
    },
    Defect {
        name: "outage_taken_back_twice",
        scenario: "an outage that is told twice",
        sees: "one outage took back two crashes",
        made: Made::Functions(&[(
            "lease_interrupted",
            "AND h.event = 'interrupted' AND h.reason = v_lease",
            "AND false",
        )]),
    },
    Defect {
        name: "busy_message_taken_back",
        scenario: "an outage that is told while its message runs",
        sees: "nothing is settled",
        made: Made::Functions(&[("lease_interrupted", " FOR UPDATE SKIP LOCKED", " FOR UPDATE")]),
    },
    Defect {
        name: "suspicion_forgotten",
        scenario: "a killer in a batch",
        sees: "nothing is settled",
        made: Made::Switch,
    },
    Defect {
        name: "probation_forgotten",
        scenario: "a partition on which a host died",
        sees: "runs without being counted first",
        made: Made::Functions(&[("take_partition", "SELECT v_starts > 1", "SELECT false")]),
    },
    // Retention
    Defect {
        name: "drop_before_move",
        scenario: "a removal",
        sees: "an open message is lost",
        made: Made::Switch,
    },
    Defect {
        name: "retention_by_host_clock",
        scenario: "a removal",
        sees: "a message is forgotten before its time",
        made: Made::Switch,
    },
    Defect {
        name: "low_water_mark_ignored",
        scenario: "a removal",
        sees: "a forgotten message runs again",
        made: Made::Functions(&[("claim", "u.\"offset\" <= v_offset", "false")]),
    },
    Defect {
        name: "low_water_mark_without_offset",
        scenario: "a removal",
        sees: "a new message is held back",
        made: Made::Functions(&[("claim", "u.\"offset\" <= v_offset", "true")]),
    },
    Defect {
        name: "low_water_mark_without_time",
        scenario: "a removal",
        sees: "a topic that was made again is held back",
        made: Made::Functions(&[("claim", "u.timestamp_ms <= v_timestamp_ms", "true")]),
    },
    Defect {
        name: "drop_before_archive_verified",
        scenario: "an archived removal",
        sees: "an archived message is lost",
        made: Made::Switch,
    },
    // Payloads by reference
    Defect {
        name: "references_unjudged",
        scenario: "references to no payload",
        sees: "a reference left its prefix",
        made: Made::Switch,
    },
    Defect {
        name: "reference_runs",
        scenario: "references to no payload",
        sees: "a message ran without its payload",
        made: Made::Switch,
    },
    // Order
    Defect {
        name: "failure_passed_in_batch",
        scenario: "a failure before its key",
        sees: PASSED,
        made: Made::Switch,
    },
    Defect {
        name: "open_rows_unseen",
        scenario: "a failure before its key",
        sees: PASSED,
        made: Made::Functions(&[("claim", "WHEN u.ordinal = ANY (v_blocked) THEN 'waiting'", "")]),
    },
    Defect {
        name: "next_of_key_forgotten",
        scenario: "a failure before its key",
        sees: FORGOTTEN,
        made: Made::Functions(&[(
            "complete",
            "PERFORM oncebox.release_key(p_consumer, v.class, v_ordering)",
            "NULL",
        )]),
    },
    Defect {
        name: "no_key_lock_in_claim",
        scenario: "a claim beside a retry of its key",
        sees: FORGOTTEN,
        made: Made::Functions(&[(
            "claim",
            "pg_try_advisory_xact_lock(-p_consumer, (d.ordering >> 32)::int)",
            "true",
        )]),
    },
    Defect {
        name: "no_key_lock_in_worker",
        scenario: "a claim beside a retry of its key",
        sees: FORGOTTEN,
        made: Made::Functions(&[(
            "resume",
            "PERFORM pg_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int)",
            "NULL",
        )]),
    },
    Defect {
        name: "taken_key_waits",
        scenario: "a claim beside a retry of its key",
        sees: FORGOTTEN,
        made: Made::Functions(&[("claim", "WHEN u.ordering = ANY (v_taken) THEN 'received'", "")]),
    },
    Defect {
        name: "turn_unchecked",
        scenario: "a message that is due before its turn",
        sees: PASSED,
        made: Made::Functions(&[("resume", "IF v_hash IS NOT NULL AND (", "IF false AND (")]),
    },
    Defect {
        name: "no_sweep",
        scenario: "a message that waits for nothing",
        sees: FORGOTTEN,
        made: Made::Functions(&[(
            "release_unblocked",
            "pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int)",
            "false",
        )]),
    },
    // Versions of aggregates
    Defect {
        name: "old_versions_run",
        scenario: "versions out of order",
        sees: PASSED,
        made: Made::Switch,
    },
    Defect {
        name: "gaps_unseen",
        scenario: "versions out of order",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "sequence_stays",
        scenario: "versions out of order",
        sees: PASSED,
        made: Made::Switch,
    },
    Defect {
        name: "closed_gap_forgotten",
        scenario: "versions out of order",
        sees: FORGOTTEN,
        made: Made::Functions(&[(
            "next_of_key",
            ">= h.sequence_version - 1",
            "> h.sequence_version",
        )]),
    },
    Defect {
        name: "given_up_version_is_a_gap",
        scenario: "a version that is given up",
        sees: FORGOTTEN,
        made: Made::Functions(&[(
            "version_of",
            "WHERE t.place - t.nth = v_version",
            "WHERE false",
        )]),
    },
    // Replays
    Defect {
        name: "replay_sends",
        scenario: "a replay of messages that emit",
        sees: "a replay sent a message",
        made: Made::Switch,
    },
    Defect {
        name: "replay_cursor_outside",
        scenario: "a replay whose commit is lost",
        sees: ODD,
        made: Made::Switch,
    },
    Defect {
        name: "replay_step_unchecked",
        scenario: "a replay that two hosts have",
        sees: ODD,
        made: Made::Functions(&[
            ("begin_replayed", "AND r.epoch = p_epoch AND r.step = p_step", ""),
            ("complete_replayed", "AND r.epoch = p_epoch AND r.step = p_step", ""),
        ]),
    },
    Defect {
        name: "replay_kind_ignored",
        scenario: "a replay against its kind",
        sees: "a replay began against its kind",
        made: Made::Switch,
    },
    Defect {
        name: "replay_key_unlocked",
        scenario: "a replay beside a message of its key",
        sees: PASSED,
        made: Made::Functions(&[(
            "begin_replayed",
            "AND NOT pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int)",
            "AND false",
        )]),
    },
    // Jobs
    Defect {
        name: "job_lease_unchecked",
        scenario: "a job that two hosts have",
        sees: MISCOUNTED,
        made: Made::Switch,
    },
    // Outgoing messages
    Defect {
        name: "outgoing_ids_random",
        scenario: "messages that emit",
        sees: EMITTED_OTHERS,
        made: Made::Switch,
    },
    Defect {
        name: "outgoing_id_of_its_row",
        scenario: "messages that emit",
        sees: EMITTED_OTHERS,
        made: Made::Functions(&[(
            "insert_outgoing",
            "u.id, u.destination,",
            "gen_random_uuid()::text, u.destination,",
        )]),
    },
    Defect {
        name: "outgoing_cancel_outside",
        scenario: "a cancel of a message that fails",
        sees: "a cancel was not undone",
        made: Made::Switch,
    },
    Defect {
        name: "cancel_without_row_lock",
        scenario: "a cancel beside a relay",
        sees: "a message is cancelled and sent",
        made: Made::Functions(&[
            ("cancel_outgoing", "FOR UPDATE SKIP LOCKED LOOP", "LOOP"),
            (
                "cancel_outgoing",
                "next_attempt_at = NULL, settled_at",
                "next_attempt_at = NULL, locked_until = NULL, settled_at",
            ),
        ]),
    },
    Defect {
        name: "outgoing_epoch_unchecked",
        scenario: "a relay whose lease ran out",
        sees: "a stale lease confirmed a message",
        made: Made::Functions(&[("mark_outgoing", " AND o.epoch = s.epoch", "")]),
    },
    Defect {
        name: "earlier_outgoing_unseen",
        scenario: "a lane with a message under way",
        sees: PASSED,
        made: Made::Functions(&[(
            "lease_outgoing",
            "(e.due_at < d.due_at OR e.position < d.position)",
            "e.due_at < d.due_at",
        )]),
    },
    Defect {
        name: "moved_outgoing_dropped",
        scenario: "a removal of outgoing messages",
        sees: LOST,
        made: Made::Statements(
            "CREATE FUNCTION public.forget() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN \
                NULL; END $$; \
            CREATE TRIGGER forget BEFORE INSERT ON oncebox.outgoing FOR EACH ROW WHEN (NEW.bucket \
                > now() - interval '2 days' AND NEW.created_at < now() - interval '2 days') \
                EXECUTE FUNCTION public.forget()",
        ),
    },
    Defect {
        name: "outgoing_lane_ignored",
        scenario: "a parked message of a lane",
        sees: PASSED,
        made: Made::Switch,
    },
    Defect {
        name: "outgoing_sent_without_lease",
        scenario: "an endpoint that does not answer",
        sees: "a message is sent twice",
        made: Made::Switch,
    },
    Defect {
        name: "outgoing_marked_before_confirm",
        scenario: "an inbox that is fed",
        sees: LOST,
        made: Made::Switch,
    },
    Defect {
        name: "addresses_unjudged",
        scenario: "an endpoint on this machine",
        sees: "a private address is reached",
        made: Made::Switch,
    },
    Defect {
        name: "answer_apart_from_its_mark",
        scenario: "an answer that the inbox refuses once",
        sees: LOST,
        made: Made::Functions(&[
            (
                "receive",
                "INSERT INTO oncebox.inbox (consumer_id,",
                "BEGIN INSERT INTO oncebox.inbox (consumer_id,",
            ),
            (
                "receive",
                "ON CONFLICT DO NOTHING;",
                "ON CONFLICT DO NOTHING; EXCEPTION WHEN OTHERS THEN RETURN QUERY SELECT 'new', \
                    NULL::text, NULL::boolean; RETURN; END;",
            ),
        ]),
    },
    // Connections
    Defect {
        name: "strangers_keep_their_places",
        scenario: "half heads",
        sees: "a probe is kept out",
        made: Made::Switch,
    },
    Defect {
        name: "connections_unranked",
        scenario: "a connection that is used often",
        sees: "it was closed for",
        made: Made::Switch,
    },
    Defect {
        name: "held_back_leased",
        scenario: "messages that a breaker holds back",
        sees: "leases that are given back",
        made: Made::Switch,
    },
    // Turns among tenants
    Defect {
        name: "kept_places_by_clock",
        scenario: "a tenant that did much",
        sees: REFUSED,
        made: Made::Switch,
    },
    Defect {
        name: "running_uncharged",
        scenario: "a long transaction",
        sees: "the longest is next",
        made: Made::Switch,
    },
    Defect {
        name: "reserve_for_newcomers",
        scenario: "slow newcomers",
        sees: REFUSED,
        made: Made::Switch,
    },
    Defect {
        name: "loans_never_end",
        scenario: "a kept place that is wanted",
        sees: "a loan has no end",
        made: Made::Switch,
    },
    Defect {
        name: "slow_ones_begin_together",
        scenario: "slow transactions that end together",
        sees: "slow transactions begin together",
        made: Made::Switch,
    },
    // Redrive
    Defect {
        name: "redrive_loses_headers",
        scenario: "a redriven letter",
        sees: NOT_WHAT_CAME,
        made: Made::Functions(&[(
            "act_on_messages",
            "oncebox.was_restored(i)) THEN i.headers",
            "oncebox.was_restored(i)) THEN ''::bytea",
        )]),
    },
    Defect {
        name: "redrive_loses_the_key",
        scenario: "a redriven letter",
        sees: NOT_WHAT_CAME,
        made: Made::Functions(&[(
            "act_on_messages",
            "reason = CASE WHEN p_action <> 'redrive' THEN i.reason END",
            "key = NULL, reason = NULL",
        )]),
    },
    Defect {
        name: "redrive_of_any_state",
        scenario: "a redrive that is asked for twice",
        sees: ODD,
        made: Made::Functions(&[
            (
                "act_on_messages",
                "i.status IN ('failed_terminal', 'parked') AND i.processed_at <= p_as_of",
                "true",
            ),
            (
                "act_on_messages",
                "AND i.headers IS NOT NULL AND i.reason !~ '^(undecodable|unclaimable)'",
                "",
            ),
            ("act_on_messages", "AND NOT oncebox.is_unordered(i)", ""),
        ]),
    },
    Defect {
        name: "redrive_by_insert",
        scenario: "a redrive that is asked for twice",
        sees: TWICE,
        made: Made::Functions(&[(
            "act_on_messages",
            "v_done := v_done + 1",
            "v_done := v_done + 1; INSERT INTO oncebox.inbox (consumer_id, message_id, \
                retention_class, bucket, topic, partition, \
             \"offset\", record_timestamp_ms, status, reason, processed_at) \
             SELECT i.consumer_id, i.message_id, i.retention_class, i.bucket + interval '56 \
             hours', i.topic, i.partition, \
             i.\"offset\", 0, 'parked', 'copy', now() FROM oncebox.inbox i WHERE i.message_id = \
             v_id",
        )]),
    },
    Defect {
        name: "lost_record_stays",
        scenario: "a dead letter that lost its record",
        sees: "a dead letter cannot run again",
        made: Made::Switch,
    },
    Defect {
        name: "restored_by_any_payload",
        scenario: "a dead letter that lost its record",
        sees: "another payload came back",
        made: Made::Functions(&[
            (
                "claim",
                "ELSE p_hash[o.first] END IS NOT DISTINCT FROM o.hash",
                "ELSE p_hash[o.first] END IS NOT NULL",
            ),
            ("restore_records", "AND i.payload_hash IS NOT DISTINCT FROM r.hash", ""),
        ]),
    },
    Defect {
        name: "edit_changes_the_hash",
        scenario: "an edited letter that comes again",
        sees: "what comes again is taken for another message",
        made: Made::Functions(&[(
            "edit",
            "SET payload = p_payload",
            "SET payload = p_payload, payload_hash = sha256(p_payload)",
        )]),
    },
    Defect {
        name: "edit_of_any_time",
        scenario: "an edit that is asked for twice",
        sees: "an edit that was asked for before it failed again",
        made: Made::Functions(&[("edit", "p_as_of, p_actor", "now(), p_actor")]),
    },
    Defect {
        name: "erase_forgets_edits",
        scenario: "an erased letter that comes again",
        sees: "a payload is still readable",
        made: Made::Functions(&[(
            "erase",
            "UPDATE oncebox.inbox_edit e SET payload = NULL",
            "UPDATE oncebox.inbox_edit e SET payload = e.payload",
        )]),
    },
    Defect {
        name: "erased_payload_comes_back",
        scenario: "an erased letter that comes again",
        sees: "a payload came back",
        made: Made::Functions(&[(
            "claim",
            "i.event_type IS NULL OR i.erased_at IS NOT NULL",
            "i.event_type IS NULL",
        )]),
    },
    Defect {
        name: "discard_forgets_its_key",
        scenario: "a discarded message of a key",
        sees: FORGOTTEN,
        made: Made::Functions(&[(
            "act_on_messages",
            "PERFORM oncebox.release_key(p_consumer, p_class, v_hash)",
            "NULL",
        )]),
    },
    Defect {
        name: "discard_without_key_lock",
        scenario: "a discard beside a claim of its key",
        sees: FORGOTTEN,
        made: Made::Functions(&[(
            "act_on_messages",
            "NOT pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int)",
            "false",
        )]),
    },
];

type Check = fn(Option<&'static Defect>) -> LocalBoxFuture<'static, Result<()>>;

/// Scenarios in a process of the tests. A defect is switched on for a whole process, so each
/// process runs one at a time.
static IN_PROCESS: &[(&str, Check)] = &[
    ("duplicates", |defect| duplicates(defect).map(Ok).boxed_local()),
    ("a shadow", |defect| shadow(defect).map(Ok).boxed_local()),
    ("two claims over a bucket's end", |defect| two_claims(defect).map(Ok).boxed_local()),
    ("a duplicate in a later bucket", |defect| later_bucket(defect).map(Ok).boxed_local()),
    ("a claim under an old snapshot", |defect| old_snapshot(defect).map(Ok).boxed_local()),
    ("a stale host", |defect| stale_host(defect).map(Ok).boxed_local()),
    ("a guest that claims", |defect| guest_claims(defect).map(Ok).boxed_local()),
    ("a stray commit", |defect| stray_commit(defect).map(Ok).boxed_local()),
    ("a transaction lost its claim", |defect| lost_claim(defect).map(Ok).boxed_local()),
    ("a slow batch", |defect| slow_batch(defect).map(Ok).boxed_local()),
    ("a lost answer to COMMIT", |defect| lost_answer(defect).map(Ok).boxed_local()),
    ("a result that cannot be stored", |defect| bad_result(defect).map(Ok).boxed_local()),
    ("statements that nobody waits for", |defect| enqueued(defect).map(Ok).boxed_local()),
    ("a swallowed error", |defect| swallowed_error(defect).map(Ok).boxed_local()),
    ("a failure in a batch", |defect| failure_in_a_batch(defect).map(Ok).boxed_local()),
    ("a failed answer in a batch", |defect| failed_answer(defect).map(Ok).boxed_local()),
    ("a light message that fails", |defect| light_failure(defect).map(Ok).boxed_local()),
    ("an undecodable record", |defect| undecodable(defect).map(Ok).boxed_local()),
    ("a young message", |defect| young(defect).map(Ok).boxed_local()),
    ("a collision", |defect| collision(defect).map(Ok).boxed_local()),
    ("a fault of the host", |defect| fault_of_the_host(defect).map(Ok).boxed_local()),
    ("a zombie that fails", |defect| zombie(defect).map(Ok).boxed_local()),
    ("a lease that runs out", |defect| lease_runs_out(defect).map(Ok).boxed_local()),
    ("retries", |defect| retries(defect).map(Ok).boxed_local()),
    ("a message that kills its session", |defect| kills_its_session(defect).map(Ok).boxed_local()),
    ("outages under a retry", |defect| outages_under_a_retry(defect).map(Ok).boxed_local()),
    ("a restart of the server under a lease", |defect| {
        restart_under_a_lease(defect).map(Ok).boxed_local()
    }),
    ("an outage that is told twice", |defect| told_twice(defect).map(Ok).boxed_local()),
    ("an outage that is told while its message runs", |defect| {
        told_while_it_runs(defect).map(Ok).boxed_local()
    }),
    ("a killer in a batch", |defect| killer_in_a_batch(defect).map(Ok).boxed_local()),
    ("a partition on which a host died", |defect| suspect_partition(defect).map(Ok).boxed_local()),
    ("a removal", |defect| removal(defect).map(Ok).boxed_local()),
    ("an archived removal", |defect| archived_removal(defect).map(Ok).boxed_local()),
    ("references to no payload", |defect| no_payload(defect).map(Ok).boxed_local()),
    ("a failure before its key", |defect| failure_before_its_key(defect).map(Ok).boxed_local()),
    ("a claim beside a retry of its key", |defect| {
        claim_beside_a_retry(defect).map(Ok).boxed_local()
    }),
    ("a message that is due before its turn", |defect| {
        due_before_its_turn(defect).map(Ok).boxed_local()
    }),
    ("a message that waits for nothing", |defect| waits_for_nothing(defect).map(Ok).boxed_local()),
    ("versions out of order", |defect| versions_out_of_order(defect).map(Ok).boxed_local()),
    ("a version that is given up", |defect| version_given_up(defect).map(Ok).boxed_local()),
    ("a replay of messages that emit", |defect| replayed_emits(defect).map(Ok).boxed_local()),
    ("a replay whose commit is lost", |defect| replay_lost(defect).map(Ok).boxed_local()),
    ("a replay that two hosts have", |defect| replay_of_two(defect).map(Ok).boxed_local()),
    ("a replay against its kind", |defect| replay_of_commands(defect).map(Ok).boxed_local()),
    ("a replay beside a message of its key", |defect| replay_of_key(defect).map(Ok).boxed_local()),
    ("a job that two hosts have", |defect| job_of_two(defect).map(Ok).boxed_local()),
    ("messages that emit", |defect| emissions(defect).map(Ok).boxed_local()),
    ("a cancel of a message that fails", |defect| failing_cancel(defect).map(Ok).boxed_local()),
    ("a cancel beside a relay", |defect| cancel_beside_a_relay(defect).map(Ok).boxed_local()),
    ("a relay whose lease ran out", |defect| stale_relay(defect).map(Ok).boxed_local()),
    ("a lane with a message under way", |defect| lane_under_way(defect).map(Ok).boxed_local()),
    ("a removal of outgoing messages", |defect| removed_outgoing(defect).map(Ok).boxed_local()),
    ("a parked message of a lane", |defect| parked_of_a_lane(defect).map(Ok).boxed_local()),
    ("an inbox that is fed", |defect| fed_inbox(defect).map(Ok).boxed_local()),
    ("an endpoint that does not answer", |defect| silent_endpoint(defect).map(Ok).boxed_local()),
    ("an endpoint on this machine", |defect| private_endpoint(defect).map(Ok).boxed_local()),
    ("an answer that the inbox refuses once", |defect| {
        refused_answer(defect).map(Ok).boxed_local()
    }),
    ("a connection that is used often", |defect| used_often(defect).map(Ok).boxed_local()),
    ("messages that a breaker holds back", |defect| held_back(defect).map(Ok).boxed_local()),
    ("a tenant that did much", |defect| did_much(defect).map(Ok).boxed_local()),
    ("a long transaction", |_| long_transaction().map(Ok).boxed_local()),
    ("slow newcomers", |_| newcomers().map(Ok).boxed_local()),
    ("a kept place that is wanted", |_| wanted().map(Ok).boxed_local()),
    ("slow transactions that end together", |_| end_together().map(Ok).boxed_local()),
    ("a redriven letter", |defect| redriven(defect).map(Ok).boxed_local()),
    ("a redrive that is asked for twice", |defect| redriven_twice(defect).map(Ok).boxed_local()),
    ("ids made for another tenant's locks", |defect| {
        forged(defect, |fixture| strangers(fixture, SEED).boxed_local())
    }),
    ("keys that meet another tenant's", |defect| {
        forged(defect, |fixture| keys(fixture, SEED).boxed_local())
    }),
    ("messages that share a lock", |defect| {
        forged(defect, |fixture| neighbours(fixture, SEED).boxed_local())
    }),
    ("ids whose locks cross", |defect| {
        forged(defect, |fixture| crossed(fixture, SEED).boxed_local())
    }),
    ("ids made for the host's locks", |defect| hosts_locks(defect).map(Ok).boxed_local()),
    ("a dead letter that lost its record", |defect| lost_record(defect).map(Ok).boxed_local()),
    ("an edited letter that comes again", |defect| edited(defect).map(Ok).boxed_local()),
    ("an edit that is asked for twice", |defect| edited_twice(defect).map(Ok).boxed_local()),
    ("an erased letter that comes again", |defect| erased(defect).map(Ok).boxed_local()),
    ("a position that is noted", |defect| noted(defect).map(Ok).boxed_local()),
    ("a discarded message of a key", |defect| discarded(defect).map(Ok).boxed_local()),
    ("a discard beside a claim of its key", |defect| {
        discard_beside_a_claim(defect).map(Ok).boxed_local()
    }),
];

/// Scenarios with host processes, which are told of the defect by their environment.
static PROCESSES: &[(&str, Check)] = &[
    ("killed at work", |defect| killed_at_work(defect).boxed_local()),
    ("hand-over", |defect| hand_over(defect).boxed_local()),
    ("a start that ends the host", |defect| start_ends_the_host(defect).boxed_local()),
    ("a host of the release before", |defect| release_before(defect).boxed_local()),
];

/// The same, with hosts whose brokers, database or clients something befalls.
static STRUCK: &[(&str, Check)] = &[
    ("a topic made again", |defect| topic_made_again(defect).boxed_local()),
    ("a failover that loses commits", |defect| failover(defect).boxed_local()),
    ("a host that is cut off", |defect| cut_off(defect).boxed_local()),
    ("half heads", |defect| half_heads(defect).boxed_local()),
];

/// What could go wrong: the host can be sabotaged in a way that no scenario looks at.
#[test]
fn each_switch_of_the_host_has_its_row() {
    let mut rows: Vec<_> =
        DEFECTS.iter().filter(|defect| defect.is_switch()).map(|defect| defect.name).collect();
    let mut switches: Vec<_> = hooks::Defect::ALL.iter().map(|defect| defect.name()).collect();
    rows.sort_unstable();
    switches.sort_unstable();
    assert_eq!(rows, switches);
}

/// What could go wrong: a promise is broken and no test turns red. S0-023, S0-046, S1-126, S4-018.
#[tokio::test(flavor = "multi_thread")]
async fn every_defect_turns_its_scenario_red() {
    let started = Instant::now();
    let shares = futures::future::join_all((0..SHARES).map(in_another_process));
    let (shares, there, struck) = tokio::join!(
        shares,
        run_all(runs_of(PROCESSES), PROCESSES),
        run_all(runs_of(STRUCK), STRUCK)
    );
    let there = there.into_iter().chain(struck).map(|ran| (ran.name.clone(), ran));
    let seen: BTreeMap<_, _> = shares.into_iter().flatten().chain(there).collect();
    println!("\n{:<29} {:<34} {:>5}  what it saw", "DEFECT", "SCENARIO", "TIME");
    let mut missed = Vec::new();
    for (name, defect) in runs() {
        let (scenario, run) = (defect.map_or(name, |defect| defect.scenario), &seen[name]);
        let fine = match (defect, &run.saw) {
            (None, saw) => saw.is_none(),
            (Some(defect), saw) => saw.as_ref().is_some_and(|saw| saw.contains(defect.sees)),
        };
        let saw = run
            .saw
            .as_deref()
            .unwrap_or("nothing")
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        println!(
            "{:<29} {scenario:<34} {:>4.1}s  {saw:.120}",
            defect.map_or("-", |defect| defect.name),
            run.took.as_secs_f64()
        );
        if !fine {
            missed.push(format!("{name}: saw {}", run.saw.as_deref().unwrap_or("nothing")));
        }
    }
    println!("{} defects, {:.0} s", DEFECTS.len(), started.elapsed().as_secs_f64());
    // S0-023, S0-046, S4-018.
    assert!(missed.is_empty(), "{}", missed.join("\n\n"));
}

/// Processes that share the scenarios of [`IN_PROCESS`].
const SHARES: usize = 2;
/// Variable with the number of the share that a process runs.
const SHARE: &str = "ONCEBOX_TEST_SHARE";
/// Begins a line with what a run came to.
const RAN: &str = "ran: ";

/// A run of a scenario.
#[derive(Serialize, Deserialize)]
struct Ran {
    name: String,
    saw: Option<String>,
    took: Duration,
}

/// Runs a share of [`IN_PROCESS`] in a process of its own.
async fn in_another_process(share: usize) -> BTreeMap<String, Ran> {
    let mut own = tokio::process::Command::new(std::env::current_exe().unwrap());
    own.args(["--exact", "a_share_of_the_scenarios", "--nocapture"]).env(SHARE, share.to_string());
    let output = own.kill_on_drop(true).output().await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "share {share}: {said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let ran = said.lines().filter_map(|line| line.split_once(RAN));
    ran.map(|(_, json)| serde_json::from_str::<Ran>(json).unwrap())
        .map(|ran| (ran.name.clone(), ran))
        .collect()
}

/// Does nothing but in the processes that [`in_another_process`] starts.
#[tokio::test(flavor = "multi_thread")]
async fn a_share_of_the_scenarios() {
    let Ok(share) = std::env::var(SHARE) else { return };
    let share: usize = share.parse().unwrap();
    for ran in run_all(runs_of(IN_PROCESS).skip(share).step_by(SHARES), IN_PROCESS).await {
        println!("{RAN}{}", serde_json::to_string(&ran).unwrap());
    }
}

/// Every scenario without a defect, and every defect; by the name of either.
fn runs() -> impl Iterator<Item = (&'static str, Option<&'static Defect>)> {
    let green =
        [IN_PROCESS, PROCESSES, STRUCK].into_iter().flatten().map(|(name, _)| (*name, None));
    green.chain(DEFECTS.iter().map(|defect| (defect.name, Some(defect))))
}

/// Those of these scenarios.
fn runs_of(
    scenarios: &'static [(&'static str, Check)],
) -> impl Iterator<Item = (&'static str, Option<&'static Defect>)> {
    runs().filter(move |(name, defect)| find(scenarios, name, *defect).is_some())
}

fn find(
    scenarios: &'static [(&'static str, Check)],
    name: &str,
    defect: Option<&Defect>,
) -> Option<Check> {
    let scenario = defect.map_or(name, |defect| defect.scenario);
    scenarios.iter().find(|(name, _)| *name == scenario).map(|(_, check)| *check)
}

async fn run_all(
    runs: impl Iterator<Item = (&'static str, Option<&'static Defect>)>,
    scenarios: &'static [(&'static str, Check)],
) -> Vec<Ran> {
    let is_in_process = std::ptr::eq(scenarios, IN_PROCESS);
    let mut seen = Vec::new();
    for (name, defect) in runs {
        let check = find(scenarios, name, defect).expect("one of these scenarios");
        let started = Instant::now();
        if is_in_process {
            let switch = defect.filter(|defect| defect.is_switch());
            switch_sabotage(
                switch.map(|defect| hooks::Defect::named(defect.name).expect(defect.name)),
            );
        }
        let saw = aside(move || std::panic::AssertUnwindSafe(check(defect)).catch_unwind()).await;
        seen.push(Ran {
            name: name.to_owned(),
            saw: saw.map_or_else(
                |panic| Some(text(&*panic)),
                |result| result.err().map(|error| format!("{error:#}")),
            ),
            took: started.elapsed(),
        });
    }
    seen
}

fn text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a text").to_owned()
}

impl Defect {
    fn is_switch(&self) -> bool {
        matches!(self.made, Made::Switch | Made::SwitchAndFunctions(_))
    }

    /// Make it, in this database.
    async fn make(&self, fixture: &InboxFixture) {
        match self.made {
            Made::Switch => {}
            Made::Statements(sql) => fixture.execute(sql).await,
            Made::Functions(changes) | Made::SwitchAndFunctions(changes) => {
                for of_one in changes.chunk_by(|one, next| one.0 == next.0) {
                    change(fixture, of_one).await;
                }
            }
        }
    }
}

/// Replaces places of one function.
async fn change(fixture: &InboxFixture, changes: &[(&str, &str, &str)]) {
    let function = changes[0].0;
    let schema = if [
        "authorize",
        "release_unblocked",
        "act_on_messages",
        "edit",
        "erase",
        "next_of_key",
        "version_of",
        "insert_outgoing",
        "mark_outgoing",
        "receive",
        "lease_outgoing",
    ]
    .contains(&function)
    {
        "oncebox"
    } else {
        "oncebox_host"
    };
    let query = sqlx::query_scalar(AssertSqlSafe(format!(
        "SELECT pg_get_functiondef('{schema}.{function}'::regproc)"
    )));
    let mut text: String = query.fetch_one(&fixture.pool).await.unwrap();
    for (_, from, to) in changes {
        assert!(text.contains(from), "`{function}` does not say `{from}` any more:\n{text}");
        text = text.replace(from, to);
    }
    fixture.execute(text).await;
}

async fn fixture(defect: Option<&Defect>) -> InboxFixture {
    let fixture = InboxFixture::new().await.unhurried();
    if let Some(defect) = defect {
        defect.make(&fixture).await;
    }
    fixture
}

/// From now on rows go into other buckets.
async fn next_bucket(fixture: &InboxFixture) {
    fixture
        .execute("UPDATE oncebox.retention_class SET bucket = '1 second' WHERE retention_class = 1")
        .await;
}

/// Sessions that wait for a message's lock, whose space is its consumer's number; zero is that of
/// the host's own locks, which a host may wait for at any time.
const WAITS_FOR_A_MESSAGE: &str = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = \
    l.database \
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted \
    AND l.objsubid = 2 AND l.classid::bigint BETWEEN 1 AND 2147483647";

// The claim -----------------------------------------------------------------------------------

async fn duplicates(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    for _ in 0..2 {
        deliver(&fixture.host(&consumer), &records(["a", "b", "a"])).await;
    }
    fixture.finish().await;
}

/// A candidate that takes effect twice. One that did as the live version would leave the same
/// tables even if it were committed, since its transaction first takes the live effect back.
async fn shadow(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let deploy = |new: NewDeployment, component: &'static [u8]| {
        let (control, tenant, name) =
            (fixture.control.clone(), consumer.tenant.name.clone(), consumer.row.name.clone());
        async move {
            control
                .versions()
                .deploy_compiled(&tenant, &name, new, component)
                .await
                .unwrap()
                .deployment_id
        }
    };
    deploy(NewDeployment::stable("*", "h", ""), b"live").await;
    let new = NewDeployment {
        role: DeploymentRole::Shadow,
        percent: Some(100.0),
        ..NewDeployment::stable("*", "h", "")
    };
    let deployment_id = deploy(new, b"candidate").await;
    assert!(
        fixture.control.shadows().reconcile_capture(&consumer.tenant).await.unwrap().is_empty()
    );
    let handler = || Script::handler(fixture.script.clone());
    let shadow = Shadow {
        deployment_id,
        handler: handler(),
        percent: 100.0,
        duration: Duration::from_secs(10),
    };
    let host = fixture.host_with(
        &consumer,
        PlainHandlers::shadowed(handler(), shadow),
        &SessionSettings::default(),
    );
    let twice = "shadow sql INSERT INTO effect (consumer, message_id, attempt, version) VALUES \
        ('orders', 'a', 1, 1)";
    deliver(&host, &[record(0, "a", twice)]).await;
    let deadline = Instant::now() + DEADLINE;
    while fixture.control.shadows().report(deployment_id).await.unwrap().differ < 1 {
        assert!(
            Instant::now() < deadline,
            "nothing was compared: {:?}",
            fixture.control.shadows().report(deployment_id).await.unwrap()
        );
        sleep(Duration::from_millis(20)).await;
    }
    host.finish_shadows().await;
    fixture.finish().await;
}

async fn two_claims(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let (first, second) = (fixture.host(&consumer), fixture.host(&consumer));
    let claiming = tokio::spawn(async move { deliver(&first, &[record(0, "a", "gate g")]).await });
    fixture.script.gate("g").reached(1).await;
    next_bucket(&fixture).await;
    let late = tokio::spawn(async move { deliver(&second, &[record(0, "a", "gate g")]).await });
    while fixture.number(WAITS_FOR_A_MESSAGE).await == 0 && fixture.script.runs("a").len() < 2 {
        sleep(Duration::from_millis(5)).await;
    }
    fixture.script.gate("g").open();
    claiming.await.unwrap();
    late.await.unwrap();
    fixture.finish().await;
}

/// Ids that are the same in each run: some seeds have no keys that meet.
const SEED: u64 = 15;

fn forged(
    defect: Option<&'static Defect>,
    scenario: impl FnOnce(InboxFixture) -> LocalBoxFuture<'static, ()> + 'static,
) -> LocalBoxFuture<'static, Result<()>> {
    async move {
        scenario(fixture(defect).await).await;
        Ok(())
    }
    .boxed_local()
}

/// Ids whose locks have the numbers of the host's own.
async fn hosts_locks(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", PATIENT).await;
    let consumer_id = consumer.row.consumer_id;
    assert_eq!(consumer_id, 1, "the defect gives the host's locks to the first consumer");
    let mut forger = Forger::new(SEED);
    let ids: Vec<_> = (1..6).map(|n| forger.text_of_half(n, consumer_id.into())).collect();
    let records = (0..).zip(&ids).map(|(offset, id)| record(offset, id, "")).collect();
    let holding = hold(&fixture, &consumer, records).await;
    let made = timeout(patience(defect), fixture.control.tenants().create("newcomer")).await;
    holding.release().await;
    assert!(made.is_ok_and(|made| made.is_ok()), "{HOST_HELD_UP}");
    fixture.finish().await;
}

async fn later_bucket(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    deliver(&fixture.host(&consumer), &records(["a"])).await;
    next_bucket(&fixture).await;
    deliver(&fixture.host(&consumer), &records(["a"])).await;
    fixture.finish().await;
}

async fn old_snapshot(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let mut guest = Guest::connect(&fixture, &consumer).await;
    guest.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ WRITE").await.unwrap();
    guest.execute("SELECT 1").await.unwrap();
    next_bucket(&fixture).await;
    deliver(&fixture.host(&consumer), &records(["a"])).await;
    if guest.claim(&["a"]).await.is_ok() {
        guest.execute("INSERT INTO effect VALUES ('orders', 'a', 1, 1)").await.unwrap();
        guest.complete(&[], &[]).await.unwrap();
        guest.execute("COMMIT").await.unwrap();
    }
    drop(guest);
    fixture.finish().await;
}

async fn stale_host(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    fixture.execute("UPDATE oncebox.consumer SET generation = 2, generation_required = 2").await;
    let old = fixture.host(&consumer);
    let answer = open(&old, 0).await.process(&records(["a"])).await;
    assert!(answer.is_err(), "a withdrawn version completed a message");
    let version = Script::version(fixture.script.clone(), 2);
    old.set_handlers(PlainHandlers::resolving(2, move |_| Some(version.clone())));
    deliver(&old, &records(["a"])).await;
    fixture.finish().await;
}

async fn guest_claims(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let mut guest = Guest::begin(&fixture, &consumer).await;
    guest.secret = vec![0; 32];
    assert!(guest.claim(&["a"]).await.is_err(), "a guest spoke as the host");
    drop(guest);
    fixture.finish().await;
}

// Completion and commit -----------------------------------------------------------------------

async fn stray_commit(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    bounded(defect, deliver(&fixture.host(&consumer), &[record(0, "a", "sql COMMIT\nreject")]))
        .await;
    assert_eq!(
        fixture.effects(&consumer, "a").await,
        0,
        "a stray COMMIT kept an effect of a message that was refused"
    );
    fixture.finish().await;
}

/// A bug of the host, or a trick of a guest, ends the transaction that holds the claim and begins
/// another.
async fn lost_claim(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let runs = Arc::new(AtomicUsize::new(0));
    let handler = PlainHandler::new(1, move |tx, _| {
        let runs = runs.clone();
        Box::pin(async move {
            execute(tx, "INSERT INTO effect VALUES ('orders', 'a', 1, 1)").await?;
            if runs.fetch_add(1, Ordering::Relaxed) == 0 {
                execute(tx, "ROLLBACK").await?;
                execute(tx, "BEGIN READ WRITE").await?;
            }
            Ok(Output::default())
        })
    });
    let host = fixture.host_with(&consumer, PlainHandlers::of(handler), &Default::default());
    bounded(defect, deliver(&host, &records(["a"]))).await;
    assert!(fixture.find(&consumer, "a").await.is_some(), "the message is lost");
    fixture.finish().await;
}

async fn slow_batch(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "batch = { duration_ms = 50 }").await;
    fixture
        .execute(
            "CREATE SEQUENCE claims; CREATE FUNCTION count_claim() RETURNS trigger LANGUAGE \
                plpgsql SECURITY DEFINER AS \
             $$ BEGIN PERFORM nextval('public.claims'); RETURN NULL; END $$; \
             CREATE TRIGGER count_claim AFTER INSERT ON oncebox.inbox FOR EACH ROW EXECUTE \
             FUNCTION count_claim()",
        )
        .await;
    let log: Vec<_> = (0..20).map(|n| record(n, &format!("m{n}"), "sleep 40")).collect();
    deliver(&fixture.host(&consumer), &log).await;
    let claims = fixture.number("SELECT last_value FROM claims").await;
    assert!(claims <= 2 * 20 + 20, "{claims} claims were written for 20 messages");
    fixture.finish().await;
}

/// The connection breaks while PostgreSQL works on the COMMIT, and nothing is committed.
async fn lost_answer(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let schema = &consumer.tenant.schema_name;
    fixture
        .execute(format!(
            "CREATE SEQUENCE commits; CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql \
                SECURITY DEFINER AS \
        $$ BEGIN IF nextval('public.commits') = 1 THEN PERFORM pg_sleep(4); END IF; RETURN NULL; \
        END $$; \
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {schema}.effect DEFERRABLE INITIALLY \
        DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()"
        ))
        .await;
    let host = fixture.host(&consumer);
    let delivering = tokio::spawn(async move { deliver(&host, &records(["a"])).await });
    fixture
        .until(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND \
        wait_event = 'PgSleep'",
        )
        .await;
    fixture
        .execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = \
            current_database() AND wait_event = 'PgSleep'",
        )
        .await;
    delivering.await.unwrap();
    assert!(fixture.find(&consumer, "a").await.is_some(), "the message is lost");
    fixture.finish().await;
}

/// The completion is refused that was sent together with COMMIT.
async fn bad_result(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "retry = { attempts_max = 1 }").await;
    deliver(&fixture.host(&consumer), &[record(0, "a", "result \"\\u0000\"")]).await;
    let row = fixture.find(&consumer, "a").await.expect("the message is lost");
    assert_eq!(
        row.reason.as_deref(),
        Some("bad_result"),
        "the failure is not that of the completion"
    );
    fixture.finish().await;
}

/// Messages that run ahead, of which one touches no row and has to touch one.
async fn enqueued(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "retry = { attempts_max = 1 }").await;
    let handlers = PlainHandlers::of(Arc::new(interpreter(Limits::default()).await.unwrap()));
    let host = fixture.host_with(&consumer, handlers, &SessionSettings::default());
    let steps = |number: i64, own: &[(&'static str, &str)]| {
        let own = own.iter().map(|(op, text)| (*op, (*text).to_owned()));
        let effect = format!("INSERT INTO effect VALUES ('orders', 'm{number}', 1, 1)");
        let steps: Vec<_> = [("q", effect)].into_iter().chain(own).collect();
        record_of(number, &format!("m{number}"), &steps, "n")
    };
    // The second has nothing to prepare at its end, for which the host would wait.
    let none = "DELETE FROM effect WHERE attempt = 0";
    deliver(&host, &[steps(0, &[("q", none)]), steps(1, &[("u", none)])]).await;
    for (id, status) in [("m0", "completed"), ("m1", "parked")] {
        let row = fixture.row(&consumer, id).await;
        assert_eq!(row.status, status, "a message ends otherwise than its statements say");
    }
    fixture.finish().await;
}

// Failures ------------------------------------------------------------------------------------

async fn swallowed_error(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer =
        fixture.simple("", "retry = { attempts_max = 1 }\nlimits = { deadline_ms = 20_000 }").await;
    bounded(defect, deliver(&fixture.host(&consumer), &[record(0, "a", "swallow SELECT 1/0")]))
        .await;
    assert_eq!(fixture.row(&consumer, "a").await.status, "failed_terminal");
    fixture.finish().await;
}

async fn failure_in_a_batch(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    deliver(
        &fixture.host(&consumer),
        &[record(0, "a", ""), record(1, "b", "other"), record(2, "c", "")],
    )
    .await;
    fixture.finish().await;
}

async fn failed_answer(defect: Option<&Defect>) {
    let mut fixture = fixture(defect).await;
    fixture.batches();
    let consumer = fixture.simple("", "").await;
    deliver(
        &fixture.host(&consumer),
        &[record(0, "a", ""), record(1, "b", "reject"), record(2, "c", "")],
    )
    .await;
    assert_ne!(
        fixture.row(&consumer, "b").await.status,
        "completed",
        "a rejected message completed"
    );
    fixture.finish().await;
}

/// A message without a full row fails in a batch, and runs again from its row.
async fn light_failure(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let policy = "inbox = 'light'\nretry = { backoff_min_ms = 1, backoff_max_ms = 1 }";
    let consumer = fixture.simple("", policy).await;
    let host = fixture.host(&consumer);
    let fails = Record { key: Some(b"k".to_vec()), ..record(1, "b", "before 2 other") };
    deliver(&host, &[record(0, "a", ""), fails, record(2, "c", "")]).await;
    const WHOLE: &str = "SELECT count(*) FROM oncebox.inbox WHERE message_id = 'b' AND key = 'k' \
        AND event_type = 't' AND source = 't' AND payload_hash IS NOT NULL";
    assert_eq!(fixture.number(WHOLE).await, 1, "a light message lost its record");
    fixture.retry_until_settled(&host).await;
    fixture.finish().await;
}

async fn undecodable(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let bad = Record { headers: Vec::new(), ..record(1, "", "") };
    deliver(&fixture.host(&consumer), &[record(0, "a", ""), bad, record(2, "b", "")]).await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'parked'").await,
        1,
        "a record is lost"
    );
    fixture.finish().await;
}

async fn young(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "replay = { past_horizon = 'park_by_time' }").await;
    let now = fixture.number("SELECT (extract(epoch FROM now()) * 1000)::bigint").await;
    deliver(&fixture.host(&consumer), &[Record { timestamp_ms: now, ..record(0, "a", "") }]).await;
    assert_eq!(
        fixture.row(&consumer, "a").await.status,
        "completed",
        "a new message was taken for a forgotten one"
    );
    fixture.finish().await;
}

async fn collision(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    deliver(&fixture.host(&consumer), &[record(0, "a", "# one"), record(1, "a", "# two")]).await;
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE reason = 'collision'").await,
        1,
        "a message is lost"
    );
    fixture.finish().await;
}

/// The disk is full for a moment.
async fn fault_of_the_host(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    fixture
        .execute(
            "CREATE SEQUENCE completions; CREATE FUNCTION fault() RETURNS trigger LANGUAGE plpgsql \
                SECURITY DEFINER AS \
        $$ BEGIN IF nextval('public.completions') = 1 THEN RAISE EXCEPTION 'no space' USING \
        ERRCODE = '53100'; END IF; RETURN OLD; END $$; \
        CREATE TRIGGER fault BEFORE DELETE ON oncebox.guard FOR EACH ROW EXECUTE FUNCTION fault()",
        )
        .await;
    bounded(defect, deliver(&fixture.host(&consumer), &records(["a"]))).await;
    assert_eq!(
        fixture.row(&consumer, "a").await.state(),
        ("completed", None, 1),
        "the host's fault cost the message an attempt"
    );
    fixture.finish().await;
}

/// One host fails a message while another waits to take it.
async fn zombie(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "retry = { backoff_min_ms = 1, backoff_max_ms = 1 }").await;
    let gate = fixture.script.gate("g");
    let fails = PlainHandler::new(1, move |_, _| {
        let gate = gate.clone();
        Box::pin(async move {
            gate.pass().await;
            Err(Failure::new(FailureKind::Other, "too late"))
        })
    });
    let (zombie, owner) = (
        fixture.host_with(&consumer, PlainHandlers::of(fails), &Default::default()),
        fixture.host(&consumer),
    );
    let failing = tokio::spawn(async move { deliver(&zombie, &records(["a"])).await });
    fixture.script.gate("g").reached(1).await;
    let taking = {
        let owner = owner.clone();
        tokio::spawn(async move { deliver(&owner, &records(["a"])).await })
    };
    fixture.until(&format!("SELECT ({WAITS_FOR_A_MESSAGE}) = 1")).await;
    fixture.script.gate("g").open();
    failing.await.unwrap();
    taking.await.unwrap();
    fixture.retry_until_settled(&owner).await;
    fixture.finish().await;
}

// Retries and leases --------------------------------------------------------------------------

/// One worker is slow beyond its lease but lives; another leases and only then begins. A third
/// takes what it may.
async fn lease_runs_out(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    let ran_out =
        "SELECT bool_and(locked_until < now()) FROM oncebox.inbox WHERE status = 'in_progress'";

    deliver(&host, &records(["slow"])).await;
    let mut worker = Guest::connect(&fixture, &consumer).await;
    let (id, epoch) = worker.lease(50).await.unwrap().remove(0);
    assert!(begin_leased(&mut worker, &id, epoch).await);
    fixture.until(ran_out).await;
    let taking = {
        let host = host.clone();
        tokio::spawn(async move { step(&host).await })
    };
    // Time to take it, or to wait for its row.
    let _ = timeout(Duration::from_millis(300), async {
        while !taking.is_finished() {
            sleep(Duration::from_millis(5)).await
        }
    })
    .await;
    complete_leased(&mut worker, &id, epoch).await;
    let taken = taking.await.unwrap();
    assert!(matches!(taken, Ok(0)), "the message of a worker that lives was taken over: {taken:?}");

    deliver(&host, &records(["late"])).await;
    let (id, epoch) = worker.lease(50).await.unwrap().remove(0);
    fixture.until(ran_out).await;
    assert_eq!(step(&host).await.unwrap(), 1);
    if begin_leased(&mut worker, &id, epoch).await {
        complete_leased(&mut worker, &id, epoch).await;
    }
    drop(worker);
    fixture.finish().await;
}

async fn begin_leased(worker: &mut Guest, id: &str, epoch: i64) -> bool {
    worker.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE").await.unwrap();
    let ours = worker.resume(id, epoch).await.unwrap();
    if ours {
        worker
            .execute(&format!("INSERT INTO effect VALUES ('orders', '{id}', 1, 1)"))
            .await
            .unwrap();
    }
    ours
}

async fn complete_leased(worker: &mut Guest, id: &str, epoch: i64) {
    let (secret, consumer) = (hex::encode(&worker.secret), worker.consumer_id);
    worker
        .execute(&format!(
            "SELECT FROM oncebox_host.complete('\\x{secret}', {consumer}, '{{}}', '{{{id}}}', \
            '{{{epoch}}}', '{{completed}}', '{{NULL}}', '{{NULL}}', \
         '{{NULL}}', '{{NULL}}', '{{1}}', '{{true}}', '{{NULL}}', '{{NULL}}'); COMMIT"
        ))
        .await
        .unwrap();
}

async fn retries(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture
        .simple("", "retry = { attempts_max = 5, backoff_min_ms = 1, backoff_max_ms = 1 }")
        .await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "before 3 other")]).await;
    for _ in 0..4 {
        sleep(Duration::from_millis(5)).await;
        step(&host).await.unwrap();
    }
    assert_eq!(
        fixture.row(&consumer, "a").await.state(),
        ("completed", None, 3),
        "attempts are not what ran"
    );
    fixture.finish().await;
}

async fn kills_its_session(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let policy = "retry = { lease_ms = 8000, backoff_min_ms = 1, backoff_max_ms = 1 }\nlimits = { \
        deadline_ms = 5000 }";
    let consumer = fixture.simple("", policy).await;
    let pool = fixture.pool.clone();
    let deadly = PlainHandler::new(1, move |tx, _| {
        let pool = pool.clone();
        Box::pin(async move {
            let mut statement = tx.statement().await;
            let backend: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
                .fetch_one(statement.connection())
                .await
                .unwrap();
            statement.finish(None);
            sqlx::query("SELECT pg_terminate_backend($1, 1000)")
                .bind(backend)
                .execute(&pool)
                .await
                .unwrap();
            execute(tx, "SELECT 1").await.map(|_| Output::default())
        })
    });
    let host = fixture.host_with(&consumer, PlainHandlers::of(deadly), &Default::default());
    bounded(defect, deliver(&host, &records(["a"]))).await;
    let deadline = Instant::now() + patience(defect);
    while fixture.row(&consumer, "a").await.state() != ("parked", Some("crashed"), 3) {
        assert!(
            Instant::now() < deadline,
            "it runs for ever: {:?}",
            fixture.row(&consumer, "a").await
        );
        let _ = step(&host).await;
        sleep(Duration::from_millis(50)).await;
    }
    fixture.finish().await;
}

/// Everybody's connection is cut, three times, while two messages run under their leases.
async fn outages_under_a_retry(defect: Option<&Defect>) {
    // Both messages wait for the holder until they are cut off, however slow the machine is.
    const POLICY: &str = "ack = 'after_insert'\nlimits = { deadline_ms = 10000 }\nretry = { \
        lease_ms = 13000, attempts_max = 50, backoff_min_ms = 1, backoff_max_ms = 1 }";
    let settings = SessionSettings {
        lock_timeout_ms: 60_000,
        statement_timeout_ms: 60_000,
        ..SessionSettings::default()
    };
    let fixture = fixture(defect).await;
    let consumer =
        fixture.simple("CREATE TABLE hot (n int); INSERT INTO hot VALUES (0);", POLICY).await;
    let host = fixture.host_with(&consumer, fixture.scripts(), &settings);
    deliver(
        &host,
        &[
            record(0, "a", "sql UPDATE hot SET n = n + 1"),
            record(1, "b", "sql UPDATE hot SET n = n + 1"),
        ],
    )
    .await;
    let mut holder = fixture.superuser().await;
    holder
        .execute(sqlx::raw_sql(AssertSqlSafe(format!(
            "BEGIN; UPDATE {}.hot SET n = n",
            consumer.tenant.schema_name
        ))))
        .await
        .unwrap();
    let stop = CancellationToken::new();
    let workers: Vec<_> =
        (0..2).map(|_| tokio::spawn(retry::work(host.clone(), stop.clone()))).collect();
    for _ in 0..3 {
        // A message that is parked by then never waits again.
        fixture
            .until(
                "SELECT EXISTS (SELECT FROM oncebox.inbox WHERE status = 'parked') OR (SELECT \
                    count(*) = 2 FROM pg_stat_activity WHERE datname = current_database() AND \
                    wait_event_type = 'Lock')",
            )
            .await;
        let login = &consumer.tenant.login;
        // All at once, and then until they are gone.
        for wait_ms in [0, 5_000] {
            fixture
                .execute(format!(
                    "SELECT pg_terminate_backend(pid, {wait_ms}) FROM \
                pg_stat_activity WHERE usename = '{login}'"
                ))
                .await;
        }
    }
    holder.close().await.unwrap();
    fixture.until("SELECT bool_and(status IN ('completed', 'parked')) FROM oncebox.inbox").await;
    stop.cancel();
    for worker in workers {
        worker.await.unwrap();
    }
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE crashes > 0").await,
        0,
        "outages parked a message"
    );
    fixture.finish().await;
}

async fn restart_under_a_lease(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a"])).await;
    Guest::connect(&fixture, &consumer).await.lease(50).await.unwrap();
    // As if the server had been started since.
    fixture
        .execute(
            "UPDATE oncebox.inbox SET locked_until = pg_postmaster_start_time() - interval \
        '1 hour'",
        )
        .await;
    assert_eq!(step(&host).await.unwrap(), 1);
    let row = fixture.row(&consumer, "a").await;
    assert_eq!(
        (row.state(), row.crashes),
        (("completed", None, 1), 0),
        "a restart of the server is counted as a crash"
    );
    fixture.finish().await;
}

/// Three leases of a message run out, and the host of the first says, twice, that this was an
/// outage.
async fn told_twice(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "ack = 'after_insert'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a"])).await;
    let mut dying = Guest::connect(&fixture, &consumer).await;
    for epoch in 1..=3 {
        assert_eq!(dying.lease(50).await.unwrap(), [("a".to_owned(), epoch)]);
        fixture.until("SELECT locked_until < now() FROM oncebox.inbox").await;
    }
    for _ in 0..2 {
        dying.interrupted("a", 1).await.unwrap();
        assert_eq!(
            fixture.row(&consumer, "a").await.crashes,
            1,
            "one outage took back two crashes"
        );
    }
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "a").await.state(), ("completed", None, 3));
    fixture.finish().await;
}

/// A lease ran out, its message was taken over, and its host says that this was an outage while the
/// successor is at work.
async fn told_while_it_runs(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", &format!("ack = 'after_insert'\n{PATIENT}")).await;
    // The successor is at work for longer than is waited for whoever tells.
    let settings =
        SessionSettings { idle_in_transaction_timeout_ms: 600_000, ..SessionSettings::default() };
    let host = fixture.host_with(&consumer, fixture.scripts(), &settings);
    deliver(&host, &[record(0, "a", "gate g")]).await;
    let mut dying = Guest::connect(&fixture, &consumer).await;
    dying.lease(50).await.unwrap();
    fixture.until("SELECT locked_until < now() FROM oncebox.inbox").await;
    let successor = tokio::spawn(async move { step(&host).await });
    fixture.script.gate("g").reached(1).await;
    let told = timeout(patience(defect), dying.interrupted("a", 1)).await;
    fixture.script.gate("g").open();
    assert!(
        matches!(&told, Ok(Ok(outcome)) if outcome == "busy"),
        "nothing is settled: who tells waits for who works"
    );
    assert_eq!(successor.await.unwrap().unwrap(), 1);
    fixture.finish().await;
}

/// One message of a batch kills the session of whatever transaction it is in.
async fn killer_in_a_batch(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "batch = { duration_ms = 60000 }").await;
    let pool = fixture.pool.clone();
    let deadly = PlainHandler::new(1, move |tx, run| {
        let pool = pool.clone();
        let kills = run.message.id == "kills";
        Box::pin(async move {
            let mut statement = tx.statement().await;
            let backend: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
                .fetch_one(statement.connection())
                .await
                .unwrap();
            statement.finish(None);
            if kills {
                sqlx::query("SELECT pg_terminate_backend($1, 1000)")
                    .bind(backend)
                    .execute(&pool)
                    .await
                    .unwrap();
            }
            execute(
                tx,
                &format!(
                    "INSERT INTO effect VALUES ('{}', '{}', 1, 1)",
                    run.consumer, run.message.id
                ),
            )
            .await
            .map(|_| Output::default())
        })
    });
    let host = fixture.host_with(&consumer, PlainHandlers::of(deadly), &Default::default());
    bounded(defect, deliver(&host, &records(["a", "b", "c", "kills", "d", "e"]))).await;
    fixture.retry_until_settled(&host).await;
    assert_eq!(fixture.row(&consumer, "kills").await.state(), ("parked", Some("crashed"), 3));
    assert_eq!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.inbox WHERE status = 'completed' AND attempts = 1"
            )
            .await,
        5
    );
    fixture.finish().await;
}

async fn suspect_partition(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    // A host that dies gives nothing up.
    drop(open(&fixture.host(&consumer), 0).await);
    let host = fixture.host(&consumer);
    let mut partition = open(&host, 0).await;
    drive(&mut partition, &records(["a"])).await;
    assert_eq!(
        fixture.row(&consumer, "a").await.status,
        "received",
        "what may have killed a host runs without being counted first"
    );
    partition.close().await;
    fixture.retry_until_settled(&host).await;
    fixture.finish().await;
}

/// How long a scenario waits: with a defect it waits in vain, without one a busy machine may take its
/// time.
fn patience(defect: Option<&Defect>) -> Duration {
    if defect.is_some() { Duration::from_secs(12) } else { DEADLINE }
}

/// What ends when all is well.
async fn bounded<T>(defect: Option<&Defect>, work: impl Future<Output = T>) -> T {
    timeout(patience(defect), work)
        .await
        .unwrap_or_else(|_| panic!("nothing is settled: the partition is blocked"))
}

/// So many duplicates come in a row that a claim notes the partition's position.
async fn noted(defect: Option<&Defect>) {
    const POSITION: &str = "SELECT next_offset FROM oncebox.partition_position";
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let mut partition = open(&fixture.host(&consumer), 0).await;
    let records: Vec<_> = (0..800).map(|offset| record(offset, "a", "")).collect();
    for settled in (100..=800).step_by(100) {
        drive(&mut partition, &records[settled - 100..settled]).await;
        let noted = fixture.number(POSITION).await;
        assert!(
            noted <= settled as i64,
            "records would be lost: position {noted}, and {settled} are settled"
        );
    }
    assert!(fixture.number(POSITION).await > 0, "no claim noted the position");
    fixture.finish().await;
}

// Order ---------------------------------------------------------------------------------------

const TRAIL: &str =
    "CREATE TABLE trail (place bigint GENERATED ALWAYS AS IDENTITY, message_id text NOT NULL);";
const BY_KEY: &str = "order = 'key'\nretry = { backoff_min_ms = 1, backoff_max_ms = 1 }";

/// A message that leaves its id in the trail; ids say the order within their key.
fn of_key(offset: i64, id: &str, script: &str) -> Record {
    let script = format!("sql INSERT INTO trail (message_id) VALUES ('{id}')\n{script}");
    Record { key: Some(id.as_bytes()[..1].to_vec()), ..record(offset, id, &script) }
}

async fn finish_in_order(fixture: InboxFixture, consumer: &TestConsumer) {
    fixture.retry_until_settled(&fixture.host(consumer)).await;
    let trail = format!("{}.trail", consumer.tenant.schema_name);
    let passed = format!(
        "SELECT count(*) FROM {trail} a JOIN {trail} b ON a.place < b.place AND a.message_id > \
            b.message_id \
         AND left(a.message_id, 1) = left(b.message_id, 1)"
    );
    assert_eq!(fixture.number(passed).await, 0, "{PASSED}");
    assert_eq!(
        fixture.number("SELECT count(*) FROM oncebox.inbox WHERE status = 'waiting'").await,
        0,
        "{FORGOTTEN}"
    );
    fixture.finish().await;
}

/// A partition is removed whose time is over, beside one whose time is not. Then its records come
/// again, with new ones.
async fn removal(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "old", ""), record(1, "open", "park")]).await;
    age(&fixture.pool, "true", 12).await;
    deliver(&host, &[record(2, "young", "")]).await;
    age(&fixture.pool, "message_id = 'young'", 4).await;
    let retention = fixture.control.retention();
    let run =
        retention.run(&fixture.control.tenant_databases().all().await.unwrap()[0]).await.unwrap();
    assert!(run.failed.is_empty() && !run.removed.is_empty(), "{run:?}");
    assert!(fixture.find(&consumer, "open").await.is_some(), "an open message is lost");
    assert!(
        fixture.find(&consumer, "young").await.is_some(),
        "a message is forgotten before its time"
    );
    // One that was produced late, with an old timestamp, and one of a topic that was made again.
    let late = Record { timestamp_ms: 1, ..record(3, "late", "") };
    let anew = Record { timestamp_ms: 1_800_000_000_000, ..record(0, "anew", "") };
    deliver(&host, &[record(0, "old", ""), late]).await;
    deliver(&host, &[anew]).await;
    assert_eq!(fixture.effects(&consumer, "old").await, 1, "a forgotten message runs again");
    assert_eq!(
        fixture.row(&consumer, "late").await.status,
        "completed",
        "a new message is held back"
    );
    assert_eq!(
        fixture.row(&consumer, "anew").await.status,
        "completed",
        "a topic that was made again is held back"
    );
    fixture
        .execute(format!(
            "DELETE FROM {}.effect WHERE message_id = 'old'",
            consumer.tenant.schema_name
        ))
        .await;
    fixture.finish().await;
}

async fn archived_removal(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let folder = TempDir::new("archive");
    let location = format!("file://{}", folder.path().display());
    let options = ArchiveOptions { location, ..ArchiveOptions::default() };
    let control = fixture.control.clone().archiving_at(ArchiveStore::new(&options).unwrap());
    let consumer = fixture.simple("", "").await;
    let ids = ["m1", "m2", "m3"];
    deliver(&fixture.host(&consumer), &records(ids)).await;
    age(&fixture.pool, "true", 12).await;
    let retention = control.retention();
    let run =
        retention.run(&fixture.control.tenant_databases().all().await.unwrap()[0]).await.unwrap();
    assert!(run.failed.is_empty() && !run.removed.is_empty(), "{run:?}");
    for id in ids {
        let found = control.archive().find("acme", None, id).await.unwrap();
        assert_eq!(found.len(), 1, "an archived message is lost");
    }
    fixture.execute(format!("DELETE FROM {}.effect", consumer.tenant.schema_name)).await;
    fixture.finish().await;
}

async fn no_payload(defect: Option<&Defect>) {
    let mut fixture = fixture(defect).await;
    let server = S3Server::start().await;
    let stores = BTreeMap::from([("docs".to_owned(), server.store())]);
    fixture.control =
        fixture.control.clone().fetching_from(Stores::new(stores, FetchLimits::default()));
    let policy = "reference = { store = 'docs', source = { header = 'ref' } }";
    let consumer = fixture.simple("", policy).await;
    let access = NewTenantStore {
        store: "docs".to_owned(),
        bucket: BUCKET.to_owned(),
        prefix: "in".to_owned(),
        access_key_id: ACCESS_KEY_ID.to_owned(),
        secret_access_key: SECRET_ACCESS_KEY.to_owned(),
    };
    fixture.control.tenant_stores().set("acme", &access).await.unwrap();
    server.put_key("out/secret", Some(""));
    let host = fixture.host(&consumer);
    host.fetch_with(fixture.control.tenant_stores().fetcher(&consumer.tenant, "docs"));
    let referring = |offset, id: &str, key: &str| {
        let mut record = record(offset, id, "");
        record.headers.push(("ref".to_owned(), format!("s3://{BUCKET}/{key}").into_bytes()));
        record
    };
    let log = [referring(0, "stray", "out/secret"), referring(1, "missing", "in/missing")];
    deliver(&host, &log).await;
    assert_eq!(server.asked("out/secret"), 0, "a reference left its prefix");
    let effects = fixture.effects(&consumer, "missing").await;
    assert_eq!(effects, 0, "a message ran without its payload");
    fixture.finish().await;
}

async fn failure_before_its_key(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[of_key(0, "k1", "before 2 trap"), of_key(1, "k2", "")]).await;
    deliver(&host, &[of_key(2, "k3", ""), of_key(3, "x1", "")]).await;
    finish_in_order(fixture, &consumer).await;
}

async fn claim_beside_a_retry(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    let (host, other) = (fixture.host(&consumer), fixture.host(&consumer));
    deliver(&host, &[of_key(0, "k1", "before 2 trap\ngate retried")]).await;
    let retry = tokio::spawn(async move {
        while step(&host).await.unwrap() == 0 {
            sleep(Duration::from_millis(2)).await;
        }
    });
    fixture.script.gate("retried").reached(1).await;
    let live = tokio::spawn(async move {
        deliver(&other, &[of_key(1, "k2", ""), of_key(2, "x1", "gate live")]).await
    });
    fixture.script.gate("live").reached(1).await;
    fixture.script.gate("retried").open();
    // A worker that did wait for the claim is let through by it.
    let _ = timeout(Duration::from_millis(300), retry).await;
    fixture.script.gate("live").open();
    live.await.unwrap();
    finish_in_order(fixture, &consumer).await;
}

async fn due_before_its_turn(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[of_key(0, "k1", "before 2 retry 60000"), of_key(1, "k2", "")]).await;
    fixture
        .execute(
            "UPDATE oncebox.inbox SET status = 'received', next_attempt_at = now() WHERE \
        message_id = 'k2'",
        )
        .await;
    assert_eq!(step(&host).await.unwrap(), 1);
    fixture
        .execute("UPDATE oncebox.inbox SET next_attempt_at = now() WHERE message_id = 'k1'")
        .await;
    finish_in_order(fixture, &consumer).await;
}

async fn waits_for_nothing(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    deliver(&fixture.host(&consumer), &[of_key(0, "k1", "park"), of_key(1, "k2", "")]).await;
    fixture.execute("DELETE FROM oncebox.inbox WHERE message_id = 'k1'").await;
    release_unblocked(
        &fixture.pool,
        &[(consumer.row.consumer_id, consumer.policy.retention.class())],
    )
    .await
    .unwrap();
    finish_in_order(fixture, &consumer).await;
}

fn of_version(offset: i64, id: &str, version: i64, script: &str) -> Record {
    let mut record = of_key(offset, id, script);
    record.headers.push(("v".to_owned(), version.to_string().into_bytes()));
    record
}

fn in_sequence() -> String {
    format!("{BY_KEY}\nsequence = {{ version = {{ header = 'v' }}, first = 1 }}")
}

/// Ids sort as their versions do; that of an old one before all.
async fn versions_out_of_order(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple(TRAIL, &in_sequence()).await;
    let host = fixture.host(&consumer);
    deliver(&host, &[of_version(0, "k1", 1, ""), of_version(1, "k3", 3, "")]).await;
    deliver(&host, &[of_version(2, "k0", 1, ""), of_version(3, "k2", 2, "")]).await;
    assert_ne!(fixture.row(&consumer, "k2").await.status, "skipped", "{LOST}");
    finish_in_order(fixture, &consumer).await;
}

async fn version_given_up(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple(TRAIL, &in_sequence()).await;
    deliver(
        &fixture.host(&consumer),
        &[of_version(0, "k1", 1, "park"), of_version(1, "k2", 2, "")],
    )
    .await;
    act(&fixture, Action::Discard, "k1").await;
    finish_in_order(fixture, &consumer).await;
}

// Turns among tenants -------------------------------------------------------------------------

fn asked(tenant_id: i32) -> AdmissionRequest {
    AdmissionRequest {
        tenant_id,
        consumer_id: tenant_id,
        class: Class::Fair,
        memory: 0,
        messages: 1,
    }
}

/// Waits for what must not happen. A defect has as long as a busy machine may take for it; without
/// one a moment is enough, for nothing is to be seen. The caller judges what is there then.
async fn awaited(defect: Option<&Defect>, mut has_happened: impl AsyncFnMut() -> bool) {
    let most = Duration::from_millis(if defect.is_some() { 20_000 } else { 500 });
    let _ = timeout(most, async {
        while !has_happened().await {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A place for a tenant's next transaction, where it gets one before others end theirs.
async fn place(scheduler: &Scheduler, tenant_id: i32) -> Option<Admission> {
    timeout(Duration::from_millis(300), scheduler.admit(asked(tenant_id))).await.ok()
}

/// All places beside those that are kept, in transactions of one tenant that do not end.
fn seize(scheduler: &Scheduler, tenant_id: i32) -> Vec<Admission> {
    std::iter::from_fn(|| scheduler.admit(asked(tenant_id)).now_or_never()).collect()
}

const SLOW: i32 = 1_000_001;
const VICTIM: i32 = 1_000_002;
const MEMORY: u64 = 4 << 30;

/// Tenants that need a connection of the host's budget now and then, beside one that needs its own
/// all the time: it would wait for a login with each of its messages.
async fn used_often(defect: Option<&Defect>) {
    const CONNECTIONS: usize = 4;
    let fixture = fixture(defect).await;
    let budget = Budget::new(CONNECTIONS);
    let mut all = Vec::new();
    for number in 0..2 * CONNECTIONS + 1 {
        let tenant = fixture.tenant(&format!("tenant-{number}"), "").await;
        all.push(Sessions::of(
            fixture.control.tenant_databases().session_target(&tenant).unwrap(),
            &SessionSettings::default(),
            budget.clone(),
        ));
    }
    // The first tenant of the host, one in between, and the last one.
    for number in [0, CONNECTIONS, 2 * CONNECTIONS] {
        let opened = backend(&all[number]).await;
        assert_eq!(backend(&all[number]).await, opened);
        for other in (0..all.len()).filter(|other| *other != number).cycle().take(4 * CONNECTIONS) {
            backend(&all[other]).await;
            if other % 2 == 0 {
                assert_eq!(
                    backend(&all[number]).await,
                    opened,
                    "tenant {number}'s is used often: it was closed for tenant {other}"
                );
            }
            assert!(budget.in_use() <= CONNECTIONS);
        }
    }
    fixture.finish().await;
}

/// Everything of a consumer is due, and its one version may not run.
async fn held_back(defect: Option<&Defect>) {
    const POLICY: &str = "batch = { messages_max = 1 }\nbreaker = { runs_min = 10, pause_ms = \
        3600000, pause_max_ms = 3600000 }";
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", POLICY).await;
    let host = fixture.host(&consumer);
    let traps: Vec<_> = (0..10).map(|n| record(n, &format!("m{n}"), "trap")).collect();
    deliver(&host, &traps).await;
    fixture.execute("UPDATE oncebox.inbox SET next_attempt_at = now()").await;
    let stop = CancellationToken::new();
    let worker = tokio::spawn(retry::work(host, stop.clone()));
    const EPOCHS: &str = "SELECT sum(epoch)::int8 FROM oncebox.inbox";
    awaited(defect, async || fixture.number(EPOCHS).await > 0).await;
    assert_eq!(fixture.number(EPOCHS).await, 0, "leases that are given back");
    stop.cancel();
    worker.await.unwrap();
    fixture.finish().await;
}

/// The backend on which a transaction of these sessions ran.
async fn backend(sessions: &Sessions) -> i32 {
    let transaction = sessions.begin().await.unwrap();
    let mut statement = transaction.tx().statement().await;
    let backend =
        sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(statement.connection()).await;
    statement.finish(backend.as_ref().err());
    transaction.rollback().await;
    backend.unwrap()
}

/// A tenant whose transactions were dear, by its weight, runs nothing; another one has the host and
/// waits for more of it.
async fn did_much(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let scheduler = Scheduler::new(HostBounds::new(8, MEMORY));
    let mut tenant = fixture.tenant("acme", "").await;
    for (tenant_id, weight) in [(SLOW, 10_000), (VICTIM, 1)] {
        (tenant.tenant_id, tenant.limits.weight) = (tenant_id, weight);
        scheduler.set_limits(tenant_id, tenant.revision, &tenant.name, &tenant.limits);
    }
    let held = seize(&scheduler, SLOW);
    let mut more = pin!(scheduler.admit(asked(SLOW)));
    assert!(futures::poll!(more.as_mut()).is_pending(), "{} places", held.len());
    for _ in 0..100 {
        assert!(
            place(&scheduler, VICTIM).await.is_some(),
            "{REFUSED} to a tenant that did much before"
        );
    }
    fixture.finish().await;
}

/// One tenant's transaction goes on and on, and it waits for another; a tenant with short ones
/// does, too.
async fn long_transaction() {
    let scheduler = Scheduler::new(HostBounds::new(2, MEMORY));
    let _long = scheduler.admit(asked(SLOW)).await;
    let mut short = scheduler.admit(asked(VICTIM)).await;
    let mut more = pin!(scheduler.admit(asked(SLOW)));
    assert!(futures::poll!(more.as_mut()).is_pending());
    sleep(Duration::from_millis(300)).await;
    for _ in 0..200 {
        let mut next = pin!(scheduler.admit(asked(VICTIM)));
        assert!(futures::poll!(next.as_mut()).is_pending());
        drop(short);
        let admission = timeout(Duration::from_millis(300), next).await;
        short = admission.unwrap_or_else(|_| panic!("whose transaction is the longest is next"));
    }
}

/// Tenants of which nothing is known take kept places, and keep them.
async fn newcomers() {
    let scheduler = Scheduler::new(HostBounds::new(32, MEMORY));
    drop(scheduler.admit(asked(VICTIM)).await);
    let held = seize(&scheduler, SLOW);
    let newcomers: Vec<_> =
        (1..=4).filter_map(|tenant_id| scheduler.admit(asked(tenant_id)).now_or_never()).collect();
    assert!(
        place(&scheduler, VICTIM).await.is_some(),
        "{REFUSED}: {} newcomers have them beside {}",
        newcomers.len(),
        held.len()
    );
}

/// A tenant has a kept place for longer than it is lent, and another one that runs nothing waits
/// for it.
async fn wanted() {
    let scheduler = Scheduler::new(HostBounds::new(8, MEMORY));
    let _held = seize(&scheduler, SLOW);
    let _lent = scheduler.admit(asked(1)).now_or_never().expect("one place is kept");
    let _ = timeout(Duration::from_millis(2_500), async {
        let mut waits = pin!(scheduler.admit(asked(2)));
        while scheduler.snapshot().tenants[&1].stopped == 0 {
            assert!(futures::poll!(waits.as_mut()).is_pending(), "nobody gave a place back");
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(scheduler.snapshot().tenants[&1].stopped, 1, "a loan has no end");
}

/// Transactions of a slow tenant end together, and as many wait to follow them.
async fn end_together() {
    let scheduler = Scheduler::new(HostBounds::new(8, MEMORY));
    let mut held = seize(&scheduler, SLOW);
    sleep(Duration::from_millis(1_200)).await;
    // One goes on, which says that the tenant is slow.
    held.truncate(1);
    let next: Vec<_> = (0..6).filter_map(|_| scheduler.admit(asked(SLOW)).now_or_never()).collect();
    assert!((1..=2).contains(&next.len()), "slow transactions begin together: {} of 6", next.len());
}

// Outgoing messages ---------------------------------------------------------------------------

/// Place that every outgoing message of these scenarios goes to.
const TO: &str = "kafka:orders.out";

/// Messages of which some run a second time emit.
async fn emissions(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "retry = { backoff_min_ms = 1, backoff_max_ms = 1 }").await;
    let host = emitting_host(&fixture, &consumer);
    let emit = format!("emit {TO} key=k");
    let log = [
        emitting(0, "a", &[&emit, &emit]),
        emitting(1, "b", &[&emit, "before 2 other"]),
        emitting(2, "c", &[&emit, "reject"]),
    ];
    deliver(&host, &log).await;
    fixture.retry_until_settled(&host).await;
    check_emitted(&fixture, &consumer, &log).await;
    fixture.finish().await;
}

/// A message withdraws what another one emitted, and fails.
async fn failing_cancel(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let host = emitting_host(&fixture, &consumer);
    let emit = format!("emit {TO} token=t after=3600000");
    deliver(&host, &[emitting(0, "a", &[&emit])]).await;
    bounded(defect, deliver(&host, &[emitting(1, "b", &["cancel t", "reject"])])).await;
    let status = caused_by(&fixture, "a").await.status;
    assert_eq!(status, "received", "a cancel was not undone");
    fixture.finish().await;
}

/// A relay has leased a message, and has not committed that yet, when its consumer cancels it.
async fn cancel_beside_a_relay(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let emit = format!("emit {TO} token=t");
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &[&emit])]).await;
    let lease = StepRelay::new(&fixture, "relay", &[&consumer]).lease_statement(TO, 10);
    let mut relay = fixture.pool.begin().await.unwrap();
    let leased = sqlx::query(AssertSqlSafe(lease)).execute(&mut *relay).await.unwrap();
    assert_eq!(leased.rows_affected(), 1);
    let mut cancelling = CancelTransaction::begin(&fixture, &consumer).await;
    let cancelling = tokio::spawn(async move {
        let is_cancelled = cancelling.cancel("t").await;
        cancelling.commit().await;
        is_cancelled
    });
    // Time to answer, or to wait for the row.
    awaited(defect, async || cancelling.is_finished()).await;
    relay.commit().await.unwrap();
    let is_cancelled = bounded(defect, cancelling).await.unwrap().unwrap();
    let status = caused_by(&fixture, "a").await.status;
    assert_eq!(
        (is_cancelled, status.as_str()),
        (false, "in_progress"),
        "a message is cancelled and sent"
    );
    fixture.finish().await;
}

/// The lease of a relay runs out, another relay has the message, and the first one reports.
async fn stale_relay(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let emit = format!("emit {TO}");
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &[&emit])]).await;
    let [slow, quick] = ["slow", "quick"].map(|name| StepRelay::new(&fixture, name, &[&consumer]));
    let stale = slow.lease(TO, 1).await;
    slow.dies().await;
    assert_eq!(quick.reclaim().await, 1);
    let fresh = quick.lease(TO, 1).await;
    assert_eq!(slow.mark(&stale, "completed").await, 0, "a stale lease confirmed a message");
    assert_eq!(quick.mark(&fresh, "completed").await, 1);
    fixture.finish().await;
}

/// A relay has the first of two messages of a key, and another one looks for something to send.
async fn lane_under_way(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let emit = format!("emit {TO} key=k");
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &[&emit, &emit])]).await;
    let [one, other] = ["one", "other"].map(|name| StepRelay::new(&fixture, name, &[&consumer]));
    let first = one.lease(TO, 1).await;
    assert_eq!(first.iter().map(|row| row.ordinal).collect::<Vec<_>>(), [0]);
    assert!(other.lease(TO, 10).await.is_empty(), "{PASSED}");
    assert_eq!(one.mark(&first, "completed").await, 1);
    assert_eq!(other.lease(TO, 10).await.len(), 1);
    fixture.finish().await;
}

/// The day of a message that is still to be sent is over for long.
async fn removed_outgoing(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let line = format!("emit {TO} after=3600000");
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &[&line])]).await;
    age_outgoing(&fixture, "true", 9).await;
    let removed = fixture.control.retention().remove_outgoing(7).await;
    assert_eq!((removed.removed, removed.failed.len()), (1, 0), "{removed:?}");
    let left = fixture.number("SELECT count(*) FROM oncebox.outgoing").await;
    assert_eq!(left, 1, "an outgoing message is lost");
    fixture.finish().await;
}

/// A message is parked, and its consumer's policy says that those behind it wait.
async fn parked_of_a_lane(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "[outgoing]\non_parked = 'stop'").await;
    allow_inboxes(&fixture).await;
    let host = emitting_host(&fixture, &consumer);
    let line = |key: &str| format!("emit inbox:nobody key={key}");
    deliver(&host, &[emitting(0, "a", &[&line("k"), &line("k")])]).await;
    let relay = TestRelay::start(&fixture, "relay").await;
    let parked = "SELECT bool_or(status = 'parked') FROM oncebox.outgoing WHERE message_id = ";
    fixture.until(&format!("{parked}'a'")).await;
    // When this one is parked, the relay has looked for what is due again.
    deliver(&host, &[emitting(1, "b", &[&line("other")])]).await;
    fixture.until(&format!("{parked}'b'")).await;
    const BEHIND: &str =
        "SELECT count(*) FROM oncebox.outgoing WHERE ordinal = 1 AND status <> 'received'";
    assert_eq!(fixture.number(BEHIND).await, 0, "{PASSED}");
    relay.kill(&fixture).await;
    fixture.finish().await;
}

/// A relay delivers to an inbox of the same database.
async fn fed_inbox(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let billing = fixture.consumer(&consumer.tenant, "billing", "").await;
    allow_inboxes(&fixture).await;
    let line = "emit inbox:billing payload=#";
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &[line])]).await;
    let relay = TestRelay::start(&fixture, "relay").await;
    let arrived = format!(
        "SELECT count(*) FROM oncebox.inbox WHERE consumer_id = {}",
        billing.row.consumer_id
    );
    let deadline = Instant::now() + patience(defect);
    while fixture.number(&arrived).await == 0 {
        assert!(Instant::now() < deadline, "a message to an inbox is lost");
        sleep(Duration::from_millis(20)).await;
    }
    relay.kill(&fixture).await;
    fixture.retry_until_settled(&fixture.host(&billing)).await;
    fixture.finish().await;
}

/// The tenant of these scenarios may send to its own consumers.
async fn allow_inboxes(fixture: &InboxFixture) {
    let limits = serde_json::json!({ "destinations_allowed": ["inbox:*"] });
    let limits = limits.as_object().expect("an object");
    fixture.control.tenants().set_limits("acme", limits).await.unwrap();
}

// Endpoints -----------------------------------------------------------------------------------

/// A tenant whose consumer may send to a provider, through the endpoint `pay`.
async fn endpoint_fixture(
    defect: Option<&Defect>,
    behaviour: Behaviour,
    change: impl FnOnce(&mut NewEndpoint),
) -> (InboxFixture, TestConsumer, Provider) {
    let provider = Provider::start(behaviour).await;
    let mut fixture = fixture(defect).await;
    fixture.control = fixture.control.clone().sending_with(provider.sender());
    let consumer = fixture.simple("", "").await;
    let limits = serde_json::json!({
        "destinations_allowed": ["http:*"],
        "endpoint_hosts_allowed": [provider.authority()],
    });
    let limits = limits.as_object().expect("an object");
    fixture.control.tenants().set_limits("acme", limits).await.unwrap();
    let mut endpoint = provider.endpoint("pay");
    change(&mut endpoint);
    fixture.control.endpoints().set("acme", &endpoint, false).await.unwrap();
    (fixture, consumer, provider)
}

/// An endpoint answers one of two messages, and the relay looks for what is due again.
async fn silent_endpoint(defect: Option<&Defect>) {
    let behaviour = Behaviour::scripted(&[Reply::ActAndStall]);
    let (fixture, consumer, provider) =
        endpoint_fixture(defect, behaviour, |new| new.timeout_ms = 60_000).await;
    let line = "emit http:pay";
    deliver(&emitting_host(&fixture, &consumer), &[emitting(0, "a", &[line, line])]).await;
    let relay = TestRelay::start(&fixture, "relay").await;
    fixture.until("SELECT bool_or(status = 'completed') FROM oncebox.outgoing").await;
    // Far less than the endpoint has for its answer.
    let calls = || provider.ledger().values().map(|entry| entry.calls).collect::<Vec<_>>();
    awaited(defect, async || calls() != [1, 1]).await;
    assert_eq!(calls(), [1, 1], "a message is sent twice");
    relay.kill(&fixture).await;
    fixture.finish().await;
}

/// The lists of hosts have an endpoint whose address is none of the public Internet.
async fn private_endpoint(defect: Option<&Defect>) {
    let (mut fixture, consumer, provider) =
        endpoint_fixture(defect, Behaviour::sound(), |_| {}).await;
    fixture.control = fixture.control.clone().sending_with(provider.public_sender());
    let log = [emitting(0, "a", &["emit http:pay"])];
    deliver(&emitting_host(&fixture, &consumer), &log).await;
    let relay = TestRelay::start(&fixture, "relay").await;
    let tried = "SELECT bool_and(status IN ('parked', 'completed')) FROM oncebox.outgoing";
    fixture.until(tried).await;
    relay.kill(&fixture).await;
    assert!(provider.calls().is_empty(), "a private address is reached: {:?}", provider.calls());
    assert_eq!(caused_by(&fixture, "a").await.state(), ("parked", Some("not_allowed")));
    fixture.finish().await;
}

/// The inbox does not take the answer of an endpoint when it comes, and would take it later.
async fn refused_answer(defect: Option<&Defect>) {
    const REFUSE_ONCE: &str = "CREATE SEQUENCE public.tries; \
        CREATE FUNCTION public.refuse_once() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
            IF nextval('public.tries') = 1 THEN RAISE EXCEPTION 'not now'; END IF; \
            RETURN NEW; END $$; \
        CREATE TRIGGER refuse_once BEFORE INSERT ON oncebox.inbox FOR EACH ROW \
            WHEN (NEW.topic = 'oncebox-outgoing') EXECUTE FUNCTION public.refuse_once()";
    let delivered = |new: &mut NewEndpoint| new.answer = AnswerMode::Delivered;
    let (fixture, consumer, provider) =
        endpoint_fixture(defect, Behaviour::sound(), delivered).await;
    let log = [emitting(0, "a", &["emit http:pay"])];
    deliver(&emitting_host(&fixture, &consumer), &log).await;
    fixture.execute(REFUSE_ONCE).await;
    let relay = TestRelay::start(&fixture, "relay").await;
    fixture.until("SELECT bool_and(status = 'completed') FROM oncebox.outgoing").await;
    relay.kill(&fixture).await;
    let answers = "SELECT count(*) FROM oncebox.inbox WHERE topic = 'oncebox-outgoing'";
    assert_eq!(fixture.number(answers).await, 1, "an answer is lost");
    assert_eq!(provider.faults(), Vec::<String>::new());
    fixture.finish().await;
}

// Replays -------------------------------------------------------------------------------------

/// A replay of a message that emits; what its first run emitted was sent and removed.
async fn replayed_emits(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", PROJECTION).await;
    let host = emitting_host(&fixture, &consumer);
    deliver(&host, &[emitting(0, "a", &[&format!("emit {TO}")])]).await;
    fixture.execute("DELETE FROM oncebox.outgoing").await;
    reset(&fixture, &consumer).await;
    replay::begin(&fixture, &consumer, &ReplayFilter::default()).await;
    replay::work_off(&host).await;
    let sent = fixture.number("SELECT count(*) FROM oncebox.outgoing").await;
    assert_eq!(sent, 0, "a replay sent a message");
    fixture.finish().await;
}

/// The connection breaks while PostgreSQL works on the COMMIT of a replayed message.
async fn replay_lost(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", PROJECTION).await;
    let host = fixture.host(&consumer);
    deliver(&host, &records(["a", "b"])).await;
    reset(&fixture, &consumer).await;
    let schema = &consumer.tenant.schema_name;
    fixture
        .execute(format!(
            "CREATE SEQUENCE commits; CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql \
                SECURITY DEFINER AS \
        $$ BEGIN IF nextval('public.commits') = 1 THEN PERFORM pg_sleep(4); END IF; RETURN NULL; \
        END $$; \
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {schema}.effect DEFERRABLE INITIALLY \
        DEFERRED FOR EACH ROW EXECUTE FUNCTION slow()"
        ))
        .await;
    replay::begin(&fixture, &consumer, &ReplayFilter::default()).await;
    let replaying = host.clone();
    let replaying = tokio::spawn(async move {
        let stop = CancellationToken::new();
        // The first of these ends with the lost answer.
        for _ in 0..3 {
            let _ = oncebox_inbox::replay::work_off(&replaying, &stop).await;
        }
    });
    fixture
        .until(
            "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND \
        wait_event = 'PgSleep'",
        )
        .await;
    fixture
        .execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = \
            current_database() AND wait_event = 'PgSleep'",
        )
        .await;
    replaying.await.unwrap();
    fixture.finish().await;
}

/// The lease of a host's replay runs out while it runs a message, and another host has the replay.
async fn replay_of_two(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", PROJECTION).await;
    let [slow, quick] = [fixture.host(&consumer), fixture.host(&consumer)];
    deliver(&slow, &[record(0, "a", "sleep 1000"), record(1, "b", "")]).await;
    reset(&fixture, &consumer).await;
    replay::begin(&fixture, &consumer, &ReplayFilter::default()).await;
    let ran = || fixture.script.runs("a").len();
    let replaying = tokio::spawn(async move {
        let _ = oncebox_inbox::replay::work_off(&slow, &CancellationToken::new()).await;
    });
    while ran() < 2 {
        sleep(Duration::from_millis(5)).await;
    }
    replay::end_leases(&fixture).await;
    let other = tokio::spawn(async move {
        for _ in 0..3 {
            let stop = CancellationToken::new();
            let _ = oncebox_inbox::replay::work_off(&quick, &stop).await;
        }
    });
    bounded(defect, async {
        replaying.await.unwrap();
        other.await.unwrap();
    })
    .await;
    fixture.finish().await;
}

/// A consumer sends commands, and its operator does not say what that means for a replay.
async fn replay_of_commands(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "payload = 'all'\nreplay = { kind = 'workflow' }").await;
    deliver(&fixture.host(&consumer), &records(["a"])).await;
    let replays = fixture.control.replays();
    let plan = replays.plan("acme", "orders", &ReplayFilter::default()).await.unwrap();
    let start =
        ReplayStart { effects_suppressed: false, ..replay::start_of(plan.token, plan.found) };
    let begun = replays.start("acme", "orders", &start).await;
    assert!(begun.is_err(), "a replay began against its kind");
    fixture.finish().await;
}

/// A live message of a key runs, and one of its key is to be replayed.
async fn replay_of_key(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", &format!("{PROJECTION}\norder = 'key'")).await;
    let host = fixture.host(&consumer);
    let keyed =
        |offset, id, script| Record { key: Some(b"k".to_vec()), ..record(offset, id, script) };
    deliver(&host, &[keyed(0, "a", "")]).await;
    reset(&fixture, &consumer).await;
    replay::begin(&fixture, &consumer, &ReplayFilter::default()).await;
    let (live, running) = (host.clone(), keyed(1, "b", "gate g"));
    let live = tokio::spawn(async move { deliver(&live, &[running]).await });
    fixture.script.gate("g").reached(1).await;
    let replaying = tokio::spawn(async move { replay::work_off(&host).await });
    awaited(defect, async || fixture.script.runs("a").len() > 1).await;
    assert_eq!(fixture.script.runs("a").len(), 1, "{PASSED}");
    fixture.script.gate("g").open();
    live.await.unwrap();
    replaying.await.unwrap();
    fixture.finish().await;
}

// Jobs ----------------------------------------------------------------------------------------

/// The lease of a host's job runs out between two pages, and another host has the job.
async fn job_of_two(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    let log: Vec<_> = (0..6).map(|n| record(n, &format!("m{n}"), "park")).collect();
    deliver(&fixture.host(&consumer), &log).await;
    let jobs = fixture.control.jobs();
    let database = fixture.control.tenant_databases().by_name("").await.unwrap();
    let slow =
        NewJob { rate: Some(2), ..inbox_job(Action::Discard, "orders", JobFilter::default()) };
    let job_id = jobs.start("acme", &slow).await.unwrap().job_id;
    let mut hosts = Vec::new();
    for owner in ["slow", "quick"] {
        let mut leased = jobs.lease(&database, owner, Some(job_id)).await.unwrap().unwrap();
        jobs.step(&mut leased).await.unwrap();
        fixture.execute("UPDATE oncebox.job SET locked_until = now() - interval '1 s'").await;
        hosts.push(leased);
    }
    jobs.step(&mut hosts[0]).await.unwrap();
    let done = work_off(&fixture.control, "acme", job_id).await.unwrap();
    assert_eq!(done.changed, 6, "{MISCOUNTED}");
    fixture.finish().await;
}

// Redrive -------------------------------------------------------------------------------------

/// Acts on one message of `orders`, as a host carries out a job.
async fn act(fixture: &InboxFixture, action: Action, id: &str) {
    carry_out(&fixture.control, "acme", &inbox_job(action, "orders", these(&[id]))).await.unwrap();
}

/// A message that a person runs again is given to its handler as it came.
async fn redriven(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let given = Arc::<Mutex<Vec<Message>>>::default();
    let seen = given.clone();
    let parks = PlainHandler::new(1, move |_, run| {
        seen.lock().unwrap().push(run.message.clone());
        Box::pin(async move { Err(Failure::new(FailureKind::Park, "a test")) })
    });
    let host = fixture.host_with(&consumer, PlainHandlers::of(parks), &SessionSettings::default());
    let mut letter = Record { key: Some(b"k".to_vec()), ..record(0, "a", "") };
    letter.headers.push(("causation".to_owned(), b"c-1".to_vec()));
    deliver(&host, &[letter]).await;
    let first = given.lock().unwrap().len();
    act(&fixture, Action::Redrive, "a").await;
    fixture.retry_until_settled(&host).await;
    let given = given.lock().unwrap().clone();
    assert_eq!(given.len(), first + 1);
    let came = |run: usize| (&given[run].record.headers, &given[run].record.key);
    assert_eq!(came(first), came(0), "{NOT_WHAT_CAME}");
    fixture.finish().await;
}

async fn redriven_twice(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "payload = 'all'").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "park")]).await;
    fixture.execute("UPDATE oncebox.inbox SET payload = ''").await;
    act(&fixture, Action::Redrive, "a").await;
    fixture.check_rows().await;
    fixture.retry_until_settled(&host).await;
    // Someone who had chosen the same message before.
    let class = consumer.policy.retention.class();
    let again = format!(
        "SELECT oncebox.act_on_messages({}, {class}::smallint, 'redrive', '{{a}}', now(), 'test', 'again')",
        consumer.row.consumer_id
    );
    fixture.execute(again).await;
    fixture.retry_until_settled(&host).await;
    fixture.finish().await;
}

/// A letter that was mended and, as of then, might be mended again.
async fn edit(
    fixture: &InboxFixture,
    payload: &str,
    as_of: Option<DateTime<Utc>>,
) -> Result<(), InboxError> {
    let edit = Edit { payload: payload.into(), reason: "a test".to_owned(), as_of };
    fixture.control.messages().edit_message("acme", "orders", "a", &edit).await
}

/// A letter that was mended and then erased.
async fn erased(defect: Option<&Defect>) {
    const READABLE: &str = "SELECT (SELECT count(*) FROM oncebox.inbox WHERE payload IS NOT NULL) \
        + (SELECT count(*) FROM oncebox.inbox_edit WHERE payload IS NOT NULL)";
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    let letter = record(0, "a", "park");
    deliver(&host, std::slice::from_ref(&letter)).await;
    edit(&fixture, "reject", None).await.unwrap();
    let target = ErasureTarget::MessageId("a".to_owned());
    let request = ErasureRequest { target, consumer: None, reason: "a test".to_owned() };
    while fixture.control.erasures().erase("acme", &request).await.unwrap().proof.is_none() {}
    assert_eq!(fixture.number(READABLE).await, 0, "a payload is still readable");
    deliver(&host, &[letter]).await;
    assert_eq!(fixture.number(READABLE).await, 0, "a payload came back");
    fixture.finish().await;
}

/// A dead letter of which nothing was kept comes again, first with another payload.
async fn lost_record(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "payload = 'none'\ncollision = 'ignore'").await;
    let host = fixture.host(&consumer);
    let letter = record(0, "a", "park");
    deliver(&host, std::slice::from_ref(&letter)).await;
    deliver(&host, &[record(1, "a", "result 1")]).await;
    assert_eq!(fixture.row(&consumer, "a").await.payload, None, "another payload came back");
    deliver(&host, &[letter]).await;
    assert!(fixture.row(&consumer, "a").await.headers.is_some(), "a dead letter cannot run again");
    fixture.finish().await;
}

async fn edited(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "reject")]).await;
    edit(&fixture, "", None).await.unwrap();
    fixture.retry_until_settled(&host).await;
    deliver(&host, &[record(0, "a", "reject")]).await;
    assert_eq!(fixture.rows().await.len(), 1, "what comes again is taken for another message");
    fixture.finish().await;
}

async fn edited_twice(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple("", "").await;
    let host = fixture.host(&consumer);
    deliver(&host, &[record(0, "a", "reject")]).await;
    let asked = sqlx::query_scalar("SELECT now()").fetch_one(&fixture.pool).await.unwrap();
    edit(&fixture, "reject", Some(asked)).await.unwrap();
    fixture.retry_until_settled(&host).await;
    assert!(
        edit(&fixture, "", Some(asked)).await.is_err(),
        "an edit that was asked for before it failed again is made again"
    );
    fixture.finish().await;
}

async fn discarded(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    deliver(&fixture.host(&consumer), &[of_key(0, "k1", "park"), of_key(1, "k2", "")]).await;
    act(&fixture, Action::Discard, "k1").await;
    finish_in_order(fixture, &consumer).await;
}

/// A claim that saw the message open is not committed when that is discarded.
async fn discard_beside_a_claim(defect: Option<&Defect>) {
    let fixture = fixture(defect).await;
    let consumer = fixture.simple(TRAIL, BY_KEY).await;
    let (host, other) = (fixture.host(&consumer), fixture.host(&consumer));
    deliver(&host, &[of_key(0, "k1", "park")]).await;
    let live = tokio::spawn(async move {
        deliver(&other, &[of_key(1, "k2", ""), of_key(2, "x1", "gate live")]).await
    });
    fixture.script.gate("live").reached(1).await;
    let jobs = fixture.control.jobs();
    let discard = inbox_job(Action::Discard, "orders", these(&["k1"]));
    let job_id = jobs.start("acme", &discard).await.unwrap().job_id;
    let database = fixture.control.tenant_databases().by_name("").await.unwrap();
    let mut leased = jobs.lease(&database, "a test", Some(job_id)).await.unwrap().unwrap();
    jobs.step(&mut leased).await.unwrap();
    fixture.script.gate("live").open();
    live.await.unwrap();
    jobs.work(leased, &CancellationToken::new()).await;
    work_off(&fixture.control, "acme", job_id).await.unwrap();
    finish_in_order(fixture, &consumer).await;
}

// Host processes ------------------------------------------------------------------------------

/// A host is killed between two of ten messages, after its offsets were committed.
async fn killed_at_work(defect: Option<&Defect>) -> Result<()> {
    let fixture = HostFixture::with(Options { partitions: 1, ..Options::default() }).await?;
    fixture.send(&Load::of([Work::Sleeps(200); 10])).await?;
    let host =
        fixture.start("a", &[("ONCEBOX_SABOTAGE", defect.map_or("", |defect| defect.name))])?;
    fixture.until("SELECT count(*) FROM {schema}.ledger_entry", 3).await?;
    while fixture.positions().await?[&0].0 == 0 {
        sleep(Duration::from_millis(10)).await;
    }
    host.kill().await?;
    let successor = fixture.start("a", &[])?;
    // What is lost never settles.
    fixture.wait_settled_within(patience(defect)).await?;
    fixture.check().await?;
    successor.stop().await
}

/// A second host joins while the first is at work, on messages that take longer than the hand-over.
async fn hand_over(defect: Option<&Defect>) -> Result<()> {
    // A busy machine may need long to start the second host. What it shall see ends the scenario.
    let long_ms = if defect.is_some() { 40_000 } else { 9_000 };
    let (long, deadline_ms) = (Work::Sleeps(long_ms), long_ms + 3_000);
    let fixture =
        HostFixture::with(Options { static_members: false, deadline_ms, ..Options::default() })
            .await?;
    fixture.send(&Load::of([long; 4])).await?;
    // Partitions are drawn; both must have something, or two hosts would never be at work.
    for more in 0.. {
        if fixture.positions().await?.values().all(|(_, end)| *end > 0) {
            break;
        }
        fixture.send(&Load::of([long]).named(&format!("more{more}"))).await?;
    }
    let variables = [
        ("ONCEBOX_SABOTAGE", defect.map_or("", |defect| defect.name)),
        ("ONCEBOX_DATABASE_STATEMENT_TIMEOUT_MS", &deadline_ms.to_string()),
    ];
    let first = fixture.start("a", &variables)?;
    fixture.until_sleeping(2).await?;
    let second = fixture.start("b", &variables)?;
    let met = async {
        while fixture.number(WAITS_FOR_A_MESSAGE).await? == 0 {
            sleep(Duration::from_millis(10)).await;
        }
        fixture.violated("two hosts are at one message".to_owned())
    };
    tokio::select! {
        met = met => return met,
        settled = fixture.wait_settled() => settled?,
    }
    fixture.check().await?;
    first.stop().await?;
    second.stop().await
}

/// A topic is read to its end, deleted, and made again with more records, while no host runs; the
/// group's offsets are what they were.
async fn topic_made_again(defect: Option<&Defect>) -> Result<()> {
    let fixture =
        HostFixture::with(Options { partitions: 1, static_members: false, ..Options::default() })
            .await?;
    let variables = [
        ("ONCEBOX_SABOTAGE", defect.map_or("", |defect| defect.name)),
        ("ONCEBOX_KAFKA_IDLE_AFTER_MS", "0"),
    ];
    fixture.send(&Load::of([Work::Pay; 5]).named("old")).await?;
    let host = fixture.start("a", &variables)?;
    acked(&fixture, 5).await?;
    let notes = fixture.offsets_with_notes().await?;
    host.stop().await?;
    fixture.make_topic_again(1).await?;
    fixture.send(&Load::of([Work::Pay; 10]).named("new")).await?;
    fixture.set_offsets_with_notes(&notes).await?;
    let host = fixture.start("a", &variables)?;
    acked(&fixture, 10).await?;
    let effects = fixture.number("SELECT count(*) FROM {schema}.ledger_entry").await?;
    if effects != 15 {
        return fixture.violated(format!("messages are lost: {effects} of 15 effects"));
    }
    host.stop().await
}

/// Wait until the group has read the only partition up to this offset.
async fn acked(fixture: &HostFixture, end: i64) -> Result<()> {
    let deadline = Instant::now() + DEADLINE;
    while !fixture.positions().await.is_ok_and(|positions| positions[&0] == (end, end)) {
        anyhow::ensure!(Instant::now() < deadline, "the partition was not read to {end}");
        sleep(Duration::from_millis(25)).await;
    }
    Ok(())
}

/// A server that has not all commits takes the place of the one that confirmed them.
async fn failover(defect: Option<&Defect>) -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let fixture = HostFixture::with(Options {
        postgres: Some(cluster.url().to_owned()),
        static_members: false,
        idle_after_ms: 0,
        ..Options::default()
    })
    .await?;
    const EFFECTS: &str = "SELECT count(*) FROM {schema}.ledger_entry";
    let host = fixture
        .start_ready("a", &[("ONCEBOX_SABOTAGE", defect.map_or("", |defect| defect.name))])
        .await?;
    cluster.prepare(Successor::Standby).await?;
    fixture.send(&Load::of([Work::Pay; 20])).await?;
    fixture.until(EFFECTS, 20).await?;
    cluster.sever();
    fixture.send(&Load::of([Work::Pay; 20]).named("more")).await?;
    fixture.wait_settled().await?;
    cluster.fail_over().await?;
    cluster.heal();
    let deadline = Instant::now() + patience(defect);
    while fixture.number(EFFECTS).await.unwrap_or(0) < 40 {
        if Instant::now() > deadline {
            return fixture.violated("messages are lost with the commits of their effects".into());
        }
        sleep(Duration::from_millis(50)).await;
    }
    fixture.wait_settled().await?;
    fixture.check().await?;
    host.stop().await
}

/// A host reaches its database no more, and Kafka it does.
async fn cut_off(defect: Option<&Defect>) -> Result<()> {
    let fixture =
        HostFixture::with(Options { static_members: false, ..Options::default() }).await?;
    let (database, through) = Proxy::before(fixture.database_url()).await?;
    let variables = [
        ("ONCEBOX_SABOTAGE", defect.map_or("", |defect| defect.name)),
        ("ONCEBOX_DATABASE_URL", through.as_str()),
        ("ONCEBOX_DATABASE_LEAVE_AFTER_MS", "500"),
        ("ONCEBOX_KAFKA_IDLE_AFTER_MS", "0"),
    ];
    let host = fixture.start("a", &variables)?;
    fixture.send(&Load::of([Work::Pay])).await?;
    fixture.wait_settled().await?;
    database.close();
    // Whoever asks the database for a partition's next message hears that it is away.
    fixture.send(&Load::of([Work::Pay; 4]).named("more")).await?;
    // One that has the defect never leaves.
    let deadline = Instant::now() + patience(defect);
    while host.log_lines("it left its group") == 0 {
        if Instant::now() > deadline {
            return fixture.violated(
                "it keeps its partitions, and nobody else has their messages".to_owned(),
            );
        }
        sleep(Duration::from_millis(20)).await;
    }
    host.kill().await
}

/// Connections from three addresses, in the middle of their heads, have all places of a host's port
/// for probes.
async fn half_heads(defect: Option<&Defect>) -> Result<()> {
    let fixture = HostFixture::new().await?;
    let host = fixture
        .start_ready("a", &[("ONCEBOX_SABOTAGE", defect.map_or("", |defect| defect.name))])
        .await?;
    let mut half_open = Vec::new();
    // A second time, with all places taken again: halves of heads end by themselves after a while.
    for _ in 0..2 {
        for n in 0..300_u16 {
            let socket = TcpSocket::new_v4()?;
            socket.bind((Ipv4Addr::new(127, 0, 0, 2 + (n % 3) as u8), 0).into())?;
            let mut stream = socket.connect(host.http()).await?;
            let _ = stream.write_all(b"GET /readyz HTTP/1.1\r\n").await; // it may have been closed already
            half_open.push(stream);
        }
        // One that is kept out is refused at once.
        if host.readiness_within(Duration::from_secs(20)).await == Some(200) {
            return host.stop().await;
        }
    }
    fixture.violated("a probe is kept out".to_owned())
}

/// Something in a native library aborts the process when a consumer starts.
async fn start_ends_the_host(defect: Option<&Defect>) -> Result<()> {
    let fixture = HostFixture::new().await?;
    let variables = [
        ("ONCEBOX_SABOTAGE", defect.map_or("", |defect| defect.name)),
        ("ONCEBOX_CRASH_TOPIC", fixture.topic.as_str()),
        ("ONCEBOX_KAFKA_IDLE_AFTER_MS", "0"),
    ];
    let died = fixture.start("a", &variables)?;
    died.wait_exit().await?;
    let host = fixture.start("a", &variables)?;
    let deadline = Instant::now() + DEADLINE;
    while host.metric("oncebox_consumer_quarantined", &[&fixture.tenant.name]).await != Some(1.0) {
        if !host.is_running() {
            return fixture.violated("it ended two hosts".to_owned());
        }
        anyhow::ensure!(Instant::now() < deadline, "it is not quarantined");
        sleep(Duration::from_millis(50)).await;
    }
    host.stop().await
}

/// A host of the release before starts on tables that this release has changed, after one of this
/// release, which works on them whatever the change.
async fn release_before(defect: Option<&Defect>) -> Result<()> {
    let options = Options { idle_after_ms: 0, previous_ledger: true, ..Options::default() };
    let fixture = HostFixture::with(options).await?;
    if let Some(Made::Statements(statements)) = defect.map(|defect| &defect.made) {
        fixture.execute(statements).await?;
    }
    let load = Load::of([[Work::Pay; 10].as_slice(), &[Work::Fails(2); 4]].concat());
    let (first, second) = (load.clone().named("first"), load.named("second"));
    let host = fixture.start_ready("a", &[]).await?;
    fixture.open_accounts(&first).await?;
    fixture.send(&first).await?;
    fixture.wait_settled().await?;
    host.stop().await?;
    let host = fixture.start_previous("a")?;
    fixture.open_accounts(&second).await?;
    fixture.send(&second).await?;
    if let Err(error) = fixture.wait_settled_within(patience(defect)).await {
        return fixture.violated(format!("{UNUSABLE}: {error:#}"));
    }
    fixture.check().await?;
    host.stop().await
}
