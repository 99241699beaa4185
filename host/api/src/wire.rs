//! The types of the API's bodies, for its clients.

pub use crate::{
    audit::AuditEntry,
    changes::{Ending, NewPercent, NewRollback, Promotion, Rollback},
    consumer_changes::{Consequence, NewPolicy, NothingMore, PolicyChange, PolicyDifference},
    consumers::{Consumer, Duplicates, HostRun, NewConsumer, Quarantine, SeekOffset},
    deployments::{Deployment, Guard, NewCanary, NewDeployment, NewShadow, Retries},
    doctor::{DoctorReport, Finding},
    edit::NewEdit,
    error::{Code, Problem, ProblemDetails},
    export::InboxExport,
    handlers::Handler,
    hosts::{Host, HostFailing, HostProgress},
    inbox::{
        BulkActionWire, BulkResultWire, HistoryEventWire, InboxAlert, InboxDetailWire, InboxFilter,
        InboxOpen, InboxRowWire, InboxStats, MessageHistoryWire,
    },
    migrations::{Migration, NewMigration},
    seek::{NewOffset, NewSeek, SeekEdge, SeekPartition, SeekPlan},
    shadows::{ShadowDifference, ShadowReport, ShadowSkipped, ShadowSum},
    tenant_changes::{Nothing, TenantDeletion, TenantLimits, TenantRemoval},
    tenants::{NewTenant, Tenant},
    tokens::{NewToken, Role, Token, TokenCreated},
    versions::{Change, Version, VersionDiff},
    whoami::Whoami,
};
