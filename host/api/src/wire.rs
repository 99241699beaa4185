//! The types of the API's bodies, for its clients.

pub use crate::{
    archive::{
        ArchiveBody, ArchiveEnded, ArchivedFileBody, ArchivedMessageBody, FilesForgotten,
        ForgetFiles,
    },
    audit::AuditEntryBody,
    changes::{Ending, NewPercent, NewRollback, Promotion, RollbackBody},
    consumer_changes::{
        ConsequenceBody, NewPolicy, NothingMore, PolicyChangeBody, PolicyDifferenceBody,
    },
    consumers::{
        ConsumerBody, DuplicatesBody, HostConsumerStatusBody, NewConsumer, QuarantineBody,
        SeekOffsetBody, VersionBreakerBody,
    },
    databases::{DatabaseBody, DatabaseLabelBody},
    deployments::{
        DeploymentBody, GrantBody, GuardBody, NewCanary, NewDeploymentBody, NewShadow, RetriesBody,
    },
    doctor::{DoctorReport, FindingBody},
    edit::NewEdit,
    endpoints::{
        EndpointBody, EndpointBreakerBody, EndpointChangeBody, EndpointRotationBody,
        EndpointTestBody, NewEndpointBody, NewRotation,
    },
    erase::{ErasedCountBody, ErasureBody, ErasureProofBody, NewErasure},
    error::{Code, ProblemBody, ProblemDetails},
    export::InboxExport,
    handlers::HandlerBody,
    horizon::{HorizonBody, HorizonInputBody, HorizonVerdictBody},
    hosts::{HostBody, HostFailing, HostProgressBody},
    inbox::{
        HistoryEventBody, InboxAlert, InboxDetailBody, InboxOpen, InboxRowBody, InboxStats,
        MessageHistoryBody,
    },
    ingress::{IngressSecretBody, IngressSecretChangeBody, NewIngressRotation, NewIngressSecret},
    jobs::{JobBody, JobEstimateBody, JobFilterBody, NewJobBody},
    lag::{LagBody, PartitionLagBody},
    migrations::{MigrationBody, NewMigrationBody},
    outgoing::{OutgoingCountBody, OutgoingDetailBody, row::OutgoingRowBody},
    readiness::{
        BaselinePartBody, FactAnswerBody, ReadinessBody, ReadinessFactBody, ReadinessPartBody,
    },
    replays::{
        NewReplay, NewReplayPlan, ReplayBody, ReplayDetailBody, ReplayFailureBody,
        ReplayFilterBody, ReplayPlanBody,
    },
    retention::{
        DuePartitionBody, ForgottenBody, RemovalBody, RetentionBegunBody, RetentionBody,
        RetentionDatabaseBody, RetentionFailureBody, RetentionRunBody, TimePartitionBody,
    },
    seek::{NewOffset, NewSeek, SeekEdge, SeekPartition, SeekPlan},
    shadows::{ShadowDifferenceBody, ShadowReportBody, ShadowSkippedBody, ShadowSumBody},
    storage::{
        BudgetExcessBody, ConsumerStorageBody, StorageBody, StorageDatabaseBody,
        StoragePartitionBody, TenantStorageBody,
    },
    stores::{NewStore, StoreBody},
    tenant_changes::{Nothing, TenantDeletion, TenantLimitsBody, TenantRemovalBody},
    tenant_moves::{NewTenantMove, TenantMoveBody},
    tenants::{NewTenant, TenantBody},
    tokens::{NewTokenBody, Role, TokenBody, TokenCreated},
    unmask::NewUnmasking,
    verifications::{NewVerificationBody, VerificationBody},
    versions::{ChangeBody, VersionBody, VersionDiff},
    whoami::Whoami,
};
