//! Every defect that the test suite can switch on in the code of the host.

/// Declares the defects: a line of documentation, the variant, and the name in `ONCEBOX_SABOTAGE`.
macro_rules! defects {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)+) => {
        /// A defect of the host, for the test suite to notice.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Defect {
            $($(#[$doc])* $variant,)+
        }

        impl Defect {
            /// All defects.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Returns the name in `ONCEBOX_SABOTAGE`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

defects! {
    /// Messages that have a row already run again.
    DuplicatesRun = "duplicates_run",
    /// The host's own locks share the space of the messages' locks.
    HostLocksAmongMessages = "host_locks_among_messages",
    /// The host claims as many messages as before, although there was no time for them.
    WhatFitsUnlearned = "what_fits_unlearned",
    /// Claims that did not run are committed as completed.
    WithdrawnClaimsStay = "withdrawn_claims_stay",
    /// A COMMIT whose answer was lost counts as done.
    LostCommitIsDone = "lost_commit_is_done",
    /// The answer to a COMMIT counts although the completion before it was refused.
    CompletionUnread = "completion_unread",
    /// An error of the completion counts as one of the COMMIT that was sent with it.
    CompletionErrorIsCommits = "completion_error_is_commits",
    /// The host does not wait for the statements of messages that ran ahead before it completes them.
    AheadUnread = "ahead_unread",
    /// A message takes what an earlier one enqueued for its own.
    EarlierFailureIsOwn = "earlier_failure_is_own",
    /// A statement may touch another number of rows than it has to.
    RowsUnexpected = "rows_unexpected",
    /// The offset is stored before the commit.
    AckBeforeCommit = "ack_before_commit",
    /// The offset is stored before its records are settled.
    OffsetStoredBeforeSettled = "offset_stored_before_settled",
    /// A revoked partition is given up while its messages run.
    RevokeWithoutWaiting = "revoke_without_waiting",
    /// Offsets of a topic that was recreated count in the new one.
    TopicIdIgnored = "topic_id_ignored",
    /// Commits leave out the topic's id.
    TopicIdNotNoted = "topic_id_not_noted",
    /// A server that may have lost commits counts as the one that confirmed them.
    ServerUnchecked = "server_unchecked",
    /// A host without its database stays in the group.
    CutOffStays = "cut_off_stays",
    /// The mark of a start is written after the start.
    MarkAfterStart = "mark_after_start",
    /// The trial of a candidate commits.
    ShadowCommits = "shadow_commits",
    /// A failed statement does not count where the handler answers ok.
    SwallowedErrorIsOk = "swallowed_error_is_ok",
    /// The effects of a failed message are not rolled back.
    FailedEffectStays = "failed_effect_stays",
    /// All messages of a group count as completed, whatever the handler answers.
    BatchAnswersIgnored = "batch_answers_ignored",
    /// A record that cannot be decoded is not stored.
    UndecodableDropped = "undecodable_dropped",
    /// The horizon of replays is judged by the host's clock.
    HorizonByHostClock = "horizon_by_host_clock",
    /// The age of time partitions is judged by the host's clock.
    RetentionByHostClock = "retention_by_host_clock",
    /// A time partition is dropped with the messages in it that must stay.
    DropBeforeMove = "drop_before_move",
    /// A time partition is dropped although its archive lacks messages.
    DropBeforeArchiveVerified = "drop_before_archive_verified",
    /// A reference may lead out of the bucket and the prefix of its tenant.
    ReferencesUnjudged = "references_unjudged",
    /// A message whose payload was not fetched runs by what it carries.
    ReferenceRuns = "reference_runs",
    /// A message with a known id and another payload counts as a duplicate.
    CollisionsDropped = "collisions_dropped",
    /// A fault of the host costs the message an attempt.
    AttemptOnHostFault = "attempt_on_host_fault",
    /// A failure is written whether or not the message is claimed.
    FailureWrittenByUpsert = "failure_written_by_upsert",
    /// An outage counts as the fault of the message that ran.
    OutagesCharged = "outages_charged",
    /// The host forgets which messages ran on a connection that broke.
    SuspicionForgotten = "suspicion_forgotten",
    /// The budget closes any idle connection.
    ConnectionsUnranked = "connections_unranked",
    /// A failed message holds back no later message of its key.
    FailurePassedInBatch = "failure_passed_in_batch",
    /// A message runs although its aggregate is past its version.
    OldVersionsRun = "old_versions_run",
    /// A message runs although versions before its own are missing.
    GapsUnseen = "gaps_unseen",
    /// Completed messages do not move their aggregates.
    SequenceStays = "sequence_stays",
    /// A redelivery does not restore the record of a dead letter.
    LostRecordStays = "lost_record_stays",
    /// Connections without a token keep their places when the API is full.
    StrangersKeepTheirPlaces = "strangers_keep_their_places",
    /// Messages behind an open breaker are leased.
    HeldBackLeased = "held_back_leased",
    /// A running transaction costs its tenant nothing until it ends.
    RunningUncharged = "running_uncharged",
    /// Reserved admissions go by the tenants' clocks.
    KeptPlacesByClock = "kept_places_by_clock",
    /// Tenants without a history may take all reserved admissions.
    ReserveForNewcomers = "reserve_for_newcomers",
    /// Reserved admissions that are lent are not called back.
    LoansNeverEnd = "loans_never_end",
    /// Transactions of slow tenants begin together.
    SlowOnesBeginTogether = "slow_ones_begin_together",
    /// An outgoing message is marked as completed before its destination has confirmed it.
    OutgoingMarkedBeforeConfirm = "outgoing_marked_before_confirm",
    /// A relay sends an outgoing message that it has no lease on.
    OutgoingSentWithoutLease = "outgoing_sent_without_lease",
    /// Ids of outgoing messages are random, so that a repeated run emits others.
    OutgoingIdsRandom = "outgoing_ids_random",
    /// Outgoing messages are cancelled outside of the handler's transaction.
    OutgoingCancelOutside = "outgoing_cancel_outside",
    /// Outgoing messages of one destination and key are sent in any order.
    OutgoingLaneIgnored = "outgoing_lane_ignored",
    /// Requests to endpoints go to any address that a name has.
    AddressesUnjudged = "addresses_unjudged",
    /// A replayed run sends what it emits.
    ReplaySends = "replay_sends",
    /// The cursor of a replay moves before the commit, in a transaction of its own.
    ReplayCursorOutside = "replay_cursor_outside",
    /// A replay begins whatever the policy says of its consumer.
    ReplayKindIgnored = "replay_kind_ignored",
    /// A host works on a job whose lease it has lost.
    JobLeaseUnchecked = "job_lease_unchecked",
}

impl Defect {
    /// Returns the defect of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|defect| defect.name() == name)
    }
}
