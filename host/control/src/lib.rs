//! The control plane: the changes that operators and tenants make while hosts run, each in one
//! transaction with its audit row. It meets the inbox only in the database, and knows no broker, no
//! WebAssembly and no HTTP.
//!
//! The modules stand in reading order.

// The host's access to its database.
mod control;
// The handles that it returns, one for each noun, with the functions of this crate.
mod handles;
// The audit log: each change and its actor.
mod audit;
// Tokens: names of callers, and their rights.
mod tokens;
// Sessions of the console, each of a token.
mod sessions;
// Tenants: their rows, roles, secrets and removal.
mod tenants;
// Consumers: their policies, and the state that hosts must reach with them.
mod consumers;
// Versions, and the one that handles an event type.
mod deployments;
// Messages, as operators see and change them.
mod messages;
// Outgoing messages, as operators see and change them.
mod outgoing;
// Actions of operators on many messages, which hosts carry out.
mod jobs;
// Replays of completed messages.
mod replays;
// The hosts that run, and their progress.
mod hosts;
// The objects that the host makes in its own database and in those of tenants.
mod database;
// The removal of time partitions that are past their retention.
mod retention;
// The archive, to which messages go before their removal.
mod archive;
// The size of inboxes, by consumer, and their size to come.
mod storage;
// Stores from which payloads are fetched, and tenants' access to them.
mod stores;
// Endpoints outside, to which handlers send.
mod endpoints;
// Messages over HTTP: secrets, and the consumers that take them.
mod ingress;
// The erasure of the payloads of a data subject.
mod erasure;
// Checks on the live database that tenants are kept apart.
mod doctor;
// The parts of the baseline that a consumer meets.
mod readiness;

pub use archive::{
    ArchiveMark,
    find::{ArchivedDetail, ArchivedEdit},
    forget::ForgottenFiles,
    list::{ArchiveFilter, ArchiveTotal, ArchivedFile},
};
pub use audit::AuditEntry;
pub use consumers::{
    Consumer,
    delete::{DeletionStep, LastOfConsumer},
    policy_change::{Consequence, PolicyChange, PolicyDifference},
    seek::{Seek, SeekInHand, SeekOffset, SeekTurn},
    start::{Quarantine, Quarantined, Start, StartTurn},
    state::{DesiredState, RunMode},
};
pub use control::{Control, check_name};
pub use database::{
    functions::{Functions, SCHEMA_NUMBER},
    migration::Migration,
    migration_bounds::MigrationBounds,
    plan::{LockTime, MigrationPlan, PlannedLock, PlannedMigration},
    postgres_programs,
    rights::{RightsStatement, rights, rights_script},
    schema,
    statements::check_schema,
    tenant_database::{
        DatabaseLabel, DatabaseUrl, DatabaseUse, InboxDatabase, NamedDatabase, NamedDatabases,
        SourceVersion, TenantDatabase,
    },
};
pub use deployments::{
    Deployment, DeploymentRole, Grant, Guard, LiveDeployments, NewDeployment, Retries, Slot,
    canary::{CanaryRates, Outcomes, Withdrawn},
    component::{Begun, CompilationClaim, Compiled},
    deploy::{CHANNEL, limits},
    rollback::Rollback,
    shadow_report::{ShadowDifference, ShadowReport, ShadowSkipped, ShadowSum},
    verification::{NewVerification, Verification},
    version::{HandlerRow, NewVersion, Version},
};
pub use doctor::{Finding, HostLimits, Severity};
pub use endpoints::{
    breakers::{EndpointBreaker, EndpointBreakerReport},
    change::{EndpointChange, SecretRotation, generate_signing_secret},
    open::{EndpointTest, OpenEndpoint},
    settings::{DuplicateDecision, NewEndpoint, TenantEndpoint},
};
pub use erasure::{ErasedCount, ErasureProgress, ErasureProof, ErasureRequest, ErasureTarget};
pub use handles::{
    Archive, Audit, Consumers, Deployments, Doctor, Endpoints, Erasures, Hosts, Ingress, Jobs,
    Messages, OutgoingMessages, Reconciliation, Replays, Retention, Shadows, Storage,
    TenantDatabases, TenantStores, Tenants, Tokens, Versions,
};
pub use hosts::{
    ConsumerStatus, Duplicates, Host, HostConsumerStatus, HostProgress, Progress, RunState,
    VersionBreaker,
};
pub use ingress::{
    open::IngressRow,
    secret::{IngressSecret, IngressSecretChange, IngressSecrets},
};
pub use jobs::{
    JobAction,
    filter::JobFilter,
    job::{Job, JobControl},
    lease::{JobLeft, LeasedJob, OpenJobs},
    page::JobStep,
    start::{JOB_NOTE, JobEstimate, NewJob},
};
pub use messages::{
    bulk::Action,
    cursor::Cursor,
    edit::Edit,
    export::Exported,
    filter::{Filter, keys},
    history::{AggregateVersion, BlockedBy, HistoryEvent, MessageHistory},
    list::{InboxDetail, InboxRow},
    next_step::NextStep,
};
pub use oncebox_archive::{ArchiveError, ArchiveOptions, ArchiveStore, ObjectReader};
pub use outgoing::{
    act::OutgoingAction,
    filter::OutgoingFilter,
    list::{CausedMessages, OutgoingDetail, OutgoingRow, StoredAnswer},
    stats::OutgoingCount,
};
pub use readiness::{
    BaselinePart, DesiredRun, FactAnswer, InboxScan, LiveHost, LiveVersion, ReadinessFact,
    ReadinessFacts, ReadinessInput, ReadinessPart, SeenMessages, unmet_by_policy,
};
pub use replays::{
    filter::ReplayFilter,
    job::{ReplayAction, ReplayDetail, ReplayFailure, ReplayJob},
    plan::ReplayPlan,
    start::ReplayStart,
};
pub use retention::{
    Forgotten, OtherProcess, Removal, RetentionBacklog, RetentionFailure, RetentionReport,
    RetentionResult, RetentionRun, TimePartition,
};
pub use sessions::SESSION_HOURS;
pub use storage::{BudgetExcess, ConsumerStorage, StorageReport, TenantStorage};
pub use stores::{
    access::{NewTenantStore, TenantStore},
    settings::{FetchLimits, StoreSettings, Stores},
};
pub use tenants::{
    Tenant,
    credentials::Credentials,
    delete::TenantRemoval,
    keys::MasterKey,
    moves::{MoveStep, TenantMove, rows::moved_tables},
    rotation::KeyRotation,
};
pub use tokens::{NewToken, Shown, Token, TokenRole, TokenSecret};
